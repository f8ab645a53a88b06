"""``guard PARENT_PID -- COMMAND``: run a command, and end it and all below it with its notebook.

A torchrun agent that is killed leaves its ranks behind, in sessions of their own.  The guard adopts
them, and kills everything below itself when the pipe on its standard input closes, when its parent
is gone, or when the command has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_POLL_S = 0.1


def main() -> None:
    """Entry point; the exit code is the command's (128 + n for a signal n, as shells say it)."""
    parent, command = int(sys.argv[1]), sys.argv[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook decides, not its terminal
    adopt_orphans()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = None
    while code is None and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable and not os.read(0, 64):
            break
        code = process.poll()
    kill_descendants(2.0)
    code = 143 if code is None else code
    os._exit(code if code >= 0 else 128 - code)


def python(target: str, *arguments: object) -> list[str]:
    """Command that runs ``module:function`` with this process's import path."""
    module, _, function = target.partition(":")
    start = (
        "import sys; n = int(sys.argv.pop(1)); sys.path[:] = sys.argv[1:n + 1]; "
        f"del sys.argv[1:n + 1]; from {module} import {function}; {function}()"
    )
    return [sys.executable, "-c", start, str(len(sys.path)), *sys.path, *map(str, arguments)]


def adopt_orphans() -> None:
    """Make grandchildren that lose their parent children of this process (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def alive(pid: int) -> bool:
    """Whether the process lives; one that has ended and waits to be collected does not.

    In a container whose first process collects nobody, such a one stays for ever.
    """
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def kill_descendants(limit_s: float = 1.0) -> None:
    """SIGKILL everything below this process, again and again until nothing is left."""
    import psutil

    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(below, timeout=0.2)
