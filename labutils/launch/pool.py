"""The ranks of a run: started, joined into a world, stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import sys
import time
from typing import IO, Any

import torch.distributed as dist

from labutils import rundir
from labutils.launch import board as boards
from labutils.launch.board import Board
from labutils.launch.processes import ForkedProcess, Process, SpawnedProcess, forking_is_safe
from labutils.launch.wire import Packed
from labutils.launch.world import World

START_S = 120.0
"""How long the ranks may take to come up: importing torch on a busy machine is slow."""

_LOOPBACK = "127.0.0.1"


class StartError(RuntimeError):
    """The ranks did not come up."""


def loopback_store() -> dist.TCPStore:
    """A store that listens on the loopback address only, on a port that the system chooses."""
    sock = socket.socket()
    sock.bind((_LOOPBACK, 0))
    sock.listen(256)
    port = sock.getsockname()[1]
    return dist.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach()
    )


class Ranks:
    """The processes of one world.  Use :meth:`start`, then let a Run talk to them, then close."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.processes: list[Process] = []
        self.crash: list[IO[bytes]] = []
        self.epoch = itertools.count(1)
        self.directory = ""
        """The run directory that the cells on these ranks share, once there is one."""
        self.alive = False
        world.check_memory()
        self._folder = boards.own_folder()
        try:
            self.board = Board.create(str(self._folder / "board"), world.size)
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise OSError(
                f"there is no room for the ranks' shared page in {self._folder}: {error}"
            ) from None

    def start(self, group: bool = True) -> None:
        """Bring the ranks up and join them; a :class:`StartError` leaves nothing behind."""
        try:
            self.store = loopback_store()
            self.create_processes()
            for rank in range(self.world.size):
                self.processes[rank].pid = self._expect(rank, "hello")[1]
            for rank, process in enumerate(self.processes):
                process.channel.send(("join", self._config(rank, self._clock(rank), group)))
            for rank in range(self.world.size):
                self._expect(rank, "done")
            self.alive = True
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)  # everybody has opened what is in it

    def create_processes(self) -> None:
        """Start a process for each rank."""
        kind = ForkedProcess if forking_is_safe() else SpawnedProcess
        for _ in range(self.world.size):
            self.processes.append(kind())

    def _clock(self, rank: int) -> tuple[int, int]:
        """Offset of the rank's clock in ns, and its uncertainty."""
        channel = self.processes[rank].channel
        exchanges = []
        for _ in range(3):
            sent = time.monotonic_ns()
            channel.send(("clock",))
            theirs = self._expect(rank, "clock")[1]
            exchanges.append((sent, theirs, time.monotonic_ns()))
        return rundir.clock_offset(exchanges)

    def _expect(self, rank: int, kind: str) -> tuple[Any, ...]:
        """The next message of a rank that is coming up."""
        process = self.processes[rank]
        process.channel.sock.settimeout(START_S)
        try:
            message, _ = process.channel.recv()
        except (EOFError, OSError) as error:
            why = self.explain_start(process)
            if isinstance(error, TimeoutError):
                why = f"it said nothing for {START_S:.0f} s"
            raise StartError(f"rank {rank} did not start: {why}") from None
        process.channel.sock.settimeout(None)
        if message[0] == kind:
            return message
        if message[0] == "error":
            raise StartError(
                f"rank {rank} did not start: {message[3]['type']}: {message[3]['message']}"
            )
        raise StartError(f"rank {rank} said {message[0]!r} where {kind!r} was expected")

    def explain_start(self, process: Process) -> str:
        """Why a rank went away before it had said hello."""
        if isinstance(process, ForkedProcess) and (said := process.server.last_words()):
            return f"the fork server ended:\n{said}"
        return f"its process ended\n{self._output(process)}".rstrip()

    def _output(self, process: Process) -> str:
        process.output.settimeout(0.2)
        text = b""
        with contextlib.suppress(OSError):
            while data := process.output.recv(65536):
                text += data
        return text.decode(errors="replace")[-2000:]

    def _config(self, rank: int, clock: tuple[int, int], group: bool) -> dict[str, Any]:
        world = self.world
        path = self._folder / f"crash-{rank}"
        self.crash.append(open(path, "w+b", buffering=0))  # noqa: SIM115 - closed with the ranks
        return {
            "rank": rank, "local_rank": rank % world.ranks, "world_size": world.size,
            "local_world_size": world.ranks, "environ": self.environment(),
            "variables": self._variables(rank), "folder": os.getcwd(), "path": sys.path,
            "threads": world.threads, "crash": str(path), "board": self.board.path,
            "gpus": world.gpus, "backend": world.backend, "group": group, "clock": clock,
            **_virtual(world),
        }  # fmt: skip

    def environment(self) -> dict[str, str] | None:
        """The environment to give to each rank; None to let it keep its own."""
        return dict(os.environ)

    def _variables(self, rank: int) -> dict[str, Any]:
        world = self.world
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), world.threads)
        return {
            "RANK": rank, "LOCAL_RANK": rank % world.ranks, "WORLD_SIZE": world.size,
            "LOCAL_WORLD_SIZE": world.ranks, "GROUP_RANK": rank // world.ranks,
            "GROUP_WORLD_SIZE": world.nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world.size,
            "ROLE_NAME": "default", "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": self.store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "labutils",
            "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, **threads,
        }  # fmt: skip

    def send(self, rank: int, message: tuple[Any, ...], packed: Packed | None = None) -> None:
        """Send to a rank; a rank that is gone is noticed by whoever waits for its answer."""
        with contextlib.suppress(OSError):
            self.processes[rank].channel.send(message, packed)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the ranks."""
        for process in self.processes:
            process.kill(signal.SIGINT)

    def kill(self) -> None:
        """End all ranks now."""
        self.alive = False
        for process in self.processes:
            process.kill()

    def close(self, grace_s: float = 1.0) -> None:
        """Let the ranks take leave, for a short while; then end those that have not."""
        if self.alive:
            for rank in range(self.world.size):
                self.send(rank, ("bye",))
            _wait_for_exit(self.processes, grace_s)
        self.kill()
        _wait_for_exit(self.processes, 1.0)
        for process in self.processes:
            process.close()
        for file in self.crash:
            file.close()
        self.processes, self.crash = [], []
        self.board.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait_for_exit(processes: list[Process], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(p.exit_code() is None for p in processes):
        time.sleep(0.005)


def _virtual(world: World) -> dict[str, Any]:
    """Virtual GPUs of a node: those that the notebook has enabled, or one per rank.

    A rehearsed node has as many as it has ranks, so that a wrong number shows there as elsewhere.
    """
    ranks = world.ranks
    virtual = sys.modules.get("labutils.virtual")
    if virtual is None or not virtual.is_enabled():
        return {"virtual": {"devices": ranks}, "virtual_in_use": False}
    state = sys.modules["labutils.virtual.state"].state
    return {
        "virtual": {
            "devices": max(ranks, state.devices) if world.nodes == 1 else ranks,
            "profile": state.profile,
            "compute": "phantom" if state.phantom else "real",
            "pace": "wall" if virtual.is_wall() else "simulated",
        },
        "virtual_in_use": True,
    }
