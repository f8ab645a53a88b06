"""A process forked from the fork server to do what the notebook tells it.

It is a torchrun agent (:mod:`labutils.launch.agent`) or the switch of a rehearsed network
(:mod:`labutils.launch.network`).  The server ends it, and all in its process group, with the
notebook; the kernel ends it with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback

LONGEST = 1 << 17
"""Bytes of one message on a helper's channel; they arrive whole or not at all."""


def main(channel: socket.socket, log: int, parent: int) -> int:
    """Run ``module:function(channel, *arguments)`` as the first message says; its exit code."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    die_with_parent(parent)
    try:
        target, arguments, environ, folder, path = pickle.loads(channel.recv(LONGEST))
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        sys.path[:] = path
        module, _, function = target.partition(":")
        return int(getattr(importlib.import_module(module), function)(channel, *arguments) or 0)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)
