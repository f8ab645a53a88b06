"""``guard PARENT_PID -- COMMAND``: run a command, and end it and all below it with its notebook.

A torchrun agent that is killed leaves its ranks behind, in sessions of their own.  The guard adopts
them, and kills everything below itself when the pipe on its standard input closes, when its parent
is gone, or when the command has ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from labutils.launch.server import adopt_orphans, kill_descendants

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
