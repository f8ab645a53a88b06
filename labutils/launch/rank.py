"""What runs inside a rank: its environment, and the loop that serves the notebook."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import time
import types
from typing import Any

import torch
import torch.distributed as dist

from labutils import telemetry
from labutils.launch import cellcode, group, monitor
from labutils.launch.board import ABSENT, FAILED, FINISHED, RUNNING, Board
from labutils.launch.failures import describe_exception
from labutils.launch.wire import Channel, Packed, pack

_POLL_S = 0.5  # how often the parent's life is checked, besides the notebook's


def main(channel_socket: socket.socket, output: socket.socket) -> int:
    """Be a rank until the notebook says goodbye; returns the exit code."""
    return Rank(Channel(channel_socket), output).serve()


class Rank:
    """One process of a run."""

    def __init__(self, channel: Channel, output: socket.socket) -> None:
        self.channel, self.output = channel, output
        self.busy = False
        self.failed = False
        self.namespace: dict[str, Any] = {}
        self.board: Board | None = None

    def serve(self) -> int:
        """Answer the notebook's messages."""
        self._redirect_output()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        signal.signal(signal.SIGINT, self._interrupt)
        self.channel.send(("hello", os.getpid(), os.environ.get("RANK")))
        while True:
            try:
                message, packed = self.channel.recv()
            except (EOFError, OSError):
                return self._leave()
            except KeyboardInterrupt:
                continue
            if message[0] == "bye":
                return self._leave()
            self._handle(message, packed)
            del message, packed

    def _handle(self, message: tuple[Any, ...], packed: Packed) -> None:
        kind, *details = message
        if kind == "clock":
            self.channel.send(("clock", time.monotonic_ns()))
        elif kind == "join":
            self._work(self._join, details[0])
        elif kind == "absent":
            self.mark_state(ABSENT)
        else:
            options = details[0]
            self._begin(options)
            work = {"call": self._call, "cell": self._cell, "script": self._script,
                    "put": self._put, "get": self._get}[kind]  # fmt: skip
            self._work(work, options, packed)
            telemetry.rest()

    def _work(self, work: Any, *arguments: Any) -> None:
        """Do what was asked, and answer "done" with a value or "error" with what is known of it."""
        try:
            self.busy = True
            reply = work(*arguments)
            if self.stretch is not None:
                self.stretch.save()
            if hasattr(self, "monitor"):
                self.monitor.settle()
            self.busy = False
            answer: tuple[Any, ...] = ("done", time.monotonic_ns(), self._counts())
            self.mark_state(FINISHED)
        except BaseException as error:
            self.busy = False
            self.failed, reply = True, None
            answer = ("error", time.monotonic_ns(), self._counts(), describe_exception(error))
            self.mark_state(FAILED)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        with contextlib.suppress(OSError):
            self.channel.send(answer, reply)

    def _counts(self) -> dict[str, int]:
        return dict(self.monitor.counts) if hasattr(self, "monitor") else {}

    def mark_state(self, state: int) -> None:
        if self.board is not None:
            self.board.set_state(state)

    def _join(self, config: dict[str, Any]) -> Packed:
        """Take the place of one rank: environment, threads, devices, process group."""
        apply_environment(config)
        self._be_main()
        self.rank = config["rank"]
        if config["crash"]:
            self.crash = open(config["crash"], "ab", buffering=0)  # noqa: SIM115 - for ever
            faulthandler.enable(self.crash, all_threads=True)
            if hasattr(faulthandler, "register"):
                faulthandler.register(signal.SIGUSR1, self.crash, all_threads=True)
        if config["board"]:
            self.board = Board(config["board"], self.rank)
        self.device = group.choose_device(config)
        self.monitor = monitor.Monitor(self.rank, self.board, self._warn)
        monitor.install(self.monitor)
        group.install(config)
        if config["group"]:
            dist.init_process_group()
        self.clock = config["clock"]
        if self.board is not None:
            telemetry.add_sink(_Progress(self.board))
        names = {"rank": self.rank, "world_size": config["world_size"], "torch": torch,
                 "dist": dist, "device": self.device, "lab": sys.modules["labutils"]}  # fmt: skip
        self.namespace.update(names)
        return pack(None)

    def _be_main(self) -> None:
        """A module ``__main__`` of the rank's own, in which cells run."""
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module
        self.namespace = module.__dict__

    def _begin(self, options: dict[str, Any]) -> None:
        self.monitor.new_epoch(options["epoch"], options["checked"])
        self.mark_state(RUNNING)
        self.stretch = None
        if options["record"]:
            if "labutils.virtual.state" in sys.modules:
                from labutils.launch.recorded import Stretch

                self.stretch = Stretch(os.path.dirname(options["record"]), self.rank)
            telemetry.start(options["record"], self.rank, group.recorded_device(), *self.clock)
        telemetry.resume()

    def _call(self, options: dict[str, Any], packed: Packed) -> Packed:
        function, args, kwargs = packed.load()
        value = function(*args, **kwargs)
        try:
            return pack(value)
        except Exception as error:
            name = getattr(function, "__name__", "the function")
            raise TypeError(
                f"what {name} returned ({type(value).__name__}) cannot be sent to the notebook: "
                f"{type(error).__name__}: {error}; return numbers, tensors or plain containers."
            ) from None

    def _cell(self, options: dict[str, Any], packed: Packed) -> Packed:
        return pack(cellcode.run(options["source"], options["filename"], self.namespace))

    def _script(self, options: dict[str, Any], packed: Packed) -> Packed:
        sys.argv = [options["script"], *options["arguments"]]
        sys.path.insert(0, os.path.dirname(os.path.abspath(options["script"])))
        try:
            runpy.run_path(options["script"], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        return pack(None)

    def _put(self, options: dict[str, Any], packed: Packed) -> Packed:
        self.namespace.update(packed.load())
        return pack(None)

    def _get(self, options: dict[str, Any], packed: Packed) -> Packed:
        missing = [name for name in options["names"] if name not in self.namespace]
        if missing:
            raise NameError(f"there is no variable named {', '.join(missing)} here")
        return pack({name: self.namespace[name] for name in options["names"]})

    def _warn(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(("warning", text))

    def _interrupt(self, *_: Any) -> None:
        if self.busy:
            raise KeyboardInterrupt

    def _redirect_output(self) -> None:
        for number in (1, 2):
            os.dup2(self.output.fileno(), number)
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = open(  # noqa: SIM115 - for ever
                number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)

    def _watch(self) -> None:
        """End this process and what it started when the notebook, or its own parent, is gone."""
        parent = os.getppid()
        while True:
            readable, _, _ = select.select([self.output], [], [], _POLL_S)
            if readable:
                try:
                    data = self.output.recv(16)
                except OSError:
                    data = b""
                if not data:
                    _end_everything()
                if self.crash:  # asked for the stacks, where there are no signals for that
                    faulthandler.dump_traceback(self.crash, all_threads=True)
            if os.getppid() != parent:
                _end_everything()

    crash: Any = None
    stretch: Any = None

    def _leave(self) -> int:
        """Let go of everything in the order that does not deadlock, then end.

        A DDP module that outlives its process group may wait for ever in its destructor, so objects
        go first.  The notebook ends this process if even so it takes too long.
        """
        self.mark_state(FINISHED)
        telemetry.stop()
        self.namespace.clear()
        gc.collect()
        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
        import multiprocessing.util

        with contextlib.suppress(Exception):
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        return 1 if self.failed else 0


class _Progress:
    """Lets the notebook see that a rank gets on, span by span."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def begin(self, name: str, kind: str) -> None:
        self.board.advance()

    def end(self, token: Any) -> None:
        self.board.advance()


def apply_environment(config: dict[str, Any]) -> None:
    """Environment as torchrun sets it, the notebook's folder and import path, threads, seeds."""
    if config["environ"] is not None:
        os.environ.clear()
        os.environ.update(config["environ"])
    os.environ.update({name: str(value) for name, value in config["variables"].items()})
    with contextlib.suppress(OSError):
        os.chdir(config["folder"])
    sys.path[:] = [*config["path"], *(entry for entry in sys.path if entry not in config["path"])]
    torch.set_num_threads(config["threads"])
    random.seed()  # forked ranks must not share the server's state
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if sys.platform == "linux":
        import multiprocessing

        # Classes of a notebook cannot be pickled to DataLoader workers, so these are forked.
        multiprocessing.set_start_method("fork", force=True)


def _end_everything() -> None:
    with contextlib.suppress(Exception):
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(77)
