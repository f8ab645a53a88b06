"""The fork server: a process that has imported everything a rank needs, and used none of it.

Ranks are forked from here, never from the notebook's kernel: a kernel that has computed holds
threads and locks that a forked child would wait for for ever.  The server runs no torch operation,
opens no GPU and starts no thread.

The notebook sends one byte, which says what to be (a rank, or a helper such as a torchrun agent),
with three descriptors: a channel, an output, and a *handle*.  The server keeps the handle: a byte
that arrives there is a signal to send to the process, its closing means "kill", and the exit status
goes back through it.  When the notebook's process is gone,
however it went, everything that was started here is killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import struct
import sys
import time

from labutils.guard import adopt_orphans, kill_descendants

STATUS = struct.Struct("!i")
"""What comes back on the handle: the exit code, negative for a signal."""

PRELOAD = (
    "numpy", "psutil", "cloudpickle", "torch", "torch.distributed", "torch.nn.parallel",
    "torch.utils.data", "torch.utils.flop_counter",
    "torch.distributed.tensor",  # the first operation on a virtual GPU asks for it
    "labutils", "labutils.virtual.device",
    "labutils.virtual.distributed", "labutils.timing.profiles", "labutils.launch.rank",
)  # fmt: skip

LATER = ("torch._dynamo",)
"""Imported once nobody is waiting: the first ``DDP()`` needs it, the first launch does not."""

RANK, HELPER = b"F", b"H"
"""What a process is to be: a rank, or what :mod:`labutils.launch.helper` is told."""

_IDLE_S = 0.1  # nobody is waiting when nobody has asked for so long, and no rank is alive
_POLL_S = 0.5  # how often the parent's life is checked, should a copy of its sockets outlive it


def main() -> None:
    """Entry point of ``python -m labutils.launch.server SOCKET_FD PARENT_PID``."""
    requests, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    load(PRELOAD)
    Server(requests, parent).serve()


def load(names: tuple[str, ...]) -> None:
    """Import modules whose pages the ranks are to share."""
    gc.disable()  # quicker, and what is frozen below no collector writes to: it stays shared
    for name in names:
        __import__(name)
    if "labutils.virtual.device" in names:
        # Registering virtual GPUs writes to many pages; here it does so once, for all ranks.
        import labutils.virtual as virtual

        virtual.enable(1)
        virtual.disable()
    gc.collect()
    gc.freeze()
    gc.enable()


class Server:
    """Forks ranks, passes signals on, reports exits."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self.requests, self.parent = requests, parent
        self.handles: dict[int, socket.socket] = {}  # by pid of the rank
        self.selector = selectors.DefaultSelector()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)
        self.selector.register(requests, selectors.EVENT_READ, None)
        self.selector.register(self.wake_read, selectors.EVENT_READ, None)

    def serve(self) -> None:
        """Work until the notebook is gone; does not return."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write)
        asked, waiting_to_load = time.monotonic(), True
        while os.getppid() == self.parent:
            if waiting_to_load and not self.handles and time.monotonic() > asked + _IDLE_S:
                load(LATER)
                waiting_to_load = False
            for key, _ in self.selector.select(_POLL_S):
                if key.fileobj is self.requests:
                    self.answer()
                    asked = time.monotonic()
                elif key.fileobj == self.wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_read, 4096)
                elif key.data in self.handles:
                    self.pass_signal(key.data)
            self.reap()
        self.leave()

    def leave(self) -> None:
        for pid in self.handles:
            _kill_group(pid, signal.SIGKILL)
        kill_descendants()
        os._exit(0)

    def answer(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.requests, 1, 3)
        except OSError:
            data, fds = b"", []
        if not data:
            self.leave()
        channel, output, handle = fds
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            self.become(data, channel, output, handle, server)
        for fd in (channel, output):
            os.close(fd)
        self.handles[pid] = sock = socket.socket(fileno=handle)
        self.selector.register(sock, selectors.EVENT_READ, pid)

    def become(self, what: bytes, channel: int, output: int, handle: int, server: int) -> None:
        """In the child: forget the server's own descriptors, then do its work.  Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            self.selector.close()
            self.requests.close()
            for sock in self.handles.values():
                sock.close()
            for fd in (handle, self.wake_read, self.wake_write):
                os.close(fd)
            if what == HELPER:
                import labutils.launch.helper as helper

                code = helper.main(socket.socket(fileno=channel), output, server)
            else:
                import labutils.launch.rank as rank

                code = rank.main(socket.socket(fileno=channel), socket.socket(fileno=output))
        finally:
            os._exit(code)

    def pass_signal(self, pid: int) -> None:
        try:
            data = self.handles[pid].recv(64)
        except OSError:
            data = b""
        if not data:  # the notebook has let go of this rank
            self.selector.unregister(self.handles[pid])
            _kill_group(pid, signal.SIGKILL)
        for number in data:
            # An interrupt is for the rank; a kill also for the workers that it started.
            if number == signal.SIGKILL:
                _kill_group(pid, number)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def reap(self) -> None:
        while (pid := _ended_child()) is not None:
            if pid in self.handles:  # what it left behind, while its id is still its own
                _kill_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid in self.handles:
                self.report(pid, os.waitstatus_to_exitcode(status))

    def report(self, pid: int, code: int) -> None:
        sock = self.handles.pop(pid)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(sock)
        with contextlib.suppress(OSError):
            sock.sendall(STATUS.pack(code))
        sock.close()


def _ended_child() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended else None


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


if __name__ == "__main__":
    main()
