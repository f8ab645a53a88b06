"""Starting the process of a rank: forked from the fork server, or as a plain subprocess.

Either way a rank has two sockets: its channel (messages) and its output (standard output and error
run into it; nothing is ever written back, so that its closing tells the rank to end).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from typing import IO, Any, Protocol

from labutils.guard import python
from labutils.launch.server import HELPER, RANK, STATUS
from labutils.launch.wire import Channel


class Process(Protocol):
    """The process of a rank, as the notebook sees it."""

    channel: Channel
    output: socket.socket
    pid: int
    """Its process id; 0 until it has said hello."""

    def exit_code(self) -> int | None:
        """None while it lives; else its exit code, negative for a signal."""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL also ends what the rank started."""

    def close(self) -> None:
        """End it, if it has not, and let go of it."""


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets; the first is the notebook's, and a child forked by the user closes it."""
    ours, theirs = socket.socketpair()
    _sockets.add(ours)
    return ours, theirs


def adopt(sock: socket.socket) -> socket.socket:
    """Have a child forked by the user (a DataLoader's worker, say) close this socket as well."""
    _sockets.add(sock)
    return sock


def _forget_in_child() -> None:
    global _server
    _server = None
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def quiet_environment() -> dict[str, str]:
    """Environment for processes that are to import torch without starting threads or talking."""
    return {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"}


class ForkServer:
    """The notebook's connection to its fork server."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self._requests, theirs = socket_pair()
        self._process = subprocess.Popen(
            python("labutils.launch.server:main", theirs.fileno(), os.getpid()),
            pass_fds=[theirs.fileno()], start_new_session=True, env=quiet_environment(),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        theirs.close()

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, *sockets: Any, what: bytes = RANK) -> None:
        """Ask for a process that has these sockets or files: its channel, output and handle."""
        socket.send_fds(self._requests, [what], [sock.fileno() for sock in sockets])

    def last_words(self) -> str:
        """What the server said before it ended; "" while it lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # the ends of its ranks may be noticed first
        if self.alive():
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-2000:]

    def close(self) -> None:
        self._requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """The one server of this process, started where there is none or where it has died."""
    global _server
    if _server is None or not _server.alive():
        _server = ForkServer()
    return _server


def close_fork_server() -> None:
    """End the server and all its ranks."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


class Forked:
    """What the notebook holds of a process that the server has forked: its handle."""

    def __init__(self) -> None:
        self.server = fork_server()
        self._handle, self._theirs = socket_pair()
        self._handle.setblocking(False)
        self._code: int | None = None

    def _fork(self, channel: socket.socket, output: Any, what: bytes) -> None:
        self.server.fork(channel, output, self._theirs, what=what)
        for end in (channel, self._theirs):
            end.close()

    def exit_code(self) -> int | None:
        if self._code is None:
            try:
                data = self._handle.recv(STATUS.size)
                # Without a status the server itself is gone, and its ranks with it.
                self._code = STATUS.unpack(data)[0] if data else -signal.SIGKILL
            except BlockingIOError:
                pass
            except OSError:
                self._code = -signal.SIGKILL
        return self._code

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(OSError):
            self._handle.send(bytes([number]))


class ForkedProcess(Forked):
    """A rank forked from the server."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = 0
        (channel, its_channel), (self.output, its_output) = socket_pair(), socket_pair()
        self._fork(its_channel, its_output, RANK)
        its_output.close()
        self.channel = Channel(channel)

    def close(self) -> None:
        for sock in (self._handle, self.output, self.channel):
            sock.close()


class Helper(Forked):
    """A process that runs ``module:function(channel, *arguments)``, see :mod:`.helper`.

    ``channel`` carries messages of at most ``helper.LONGEST`` bytes, each of them whole.
    """

    def __init__(self, target: str, *arguments: Any, environ: dict[str, str]) -> None:
        super().__init__()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the helper
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = adopt(ours)
        self._fork(theirs, self._log, HELPER)
        order = (target, arguments, environ, os.getcwd(), sys.path)
        self.channel.send(pickle.dumps(order))

    def ended(self) -> bool:
        return self.exit_code() is not None

    def log(self) -> str:
        """What it has printed."""
        position = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), position, 0).decode(errors="replace")

    def close(self, limit_s: float = 4.0) -> None:
        """End it and all in its process group; returns when it is gone."""
        self.kill()
        deadline = time.monotonic() + limit_s
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.002)
        self._handle.close()
        self.channel.close()


class SpawnedProcess:
    """A rank that is a plain subprocess: slower to start, and the same on every system."""

    def __init__(self) -> None:
        channel, theirs = socket_pair()
        output, their_output = socket_pair()
        ends = [theirs, their_output]
        more: dict[str, Any] = {}
        if sys.platform == "win32":  # handles are passed once the process is known
            numbers, more["creationflags"] = [-1, -1], subprocess.CREATE_NEW_PROCESS_GROUP
        else:
            numbers = [end.fileno() for end in ends]
            more |= {"pass_fds": numbers, "start_new_session": True}
        self._process = subprocess.Popen(
            python("labutils.launch.spawned:main", *numbers), stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=quiet_environment(), **more,
        )  # fmt: skip
        assert self._process.stdin is not None
        if sys.platform == "win32":
            for end in ends:
                handle = end.share(self._process.pid)
                self._process.stdin.write(len(handle).to_bytes(4, "big") + handle)
        self._process.stdin.close()
        for end in ends:
            end.close()
        self.channel, self.output, self.pid = Channel(channel), output, self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            if number == signal.SIGKILL and hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)  # it leads a session of its own
            else:
                self._process.send_signal(number)

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if hasattr(os, "killpg"):  # workers that a crashed rank has left
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.output.close()
        self.channel.close()


def forking_is_safe() -> bool:
    """Whether ranks are forked here; ``LABUTILS_START=spawn`` says no, anywhere."""
    return sys.platform == "linux" and os.environ.get("LABUTILS_START", "fork") == "fork"
