"""Ranks of earlier runs that nobody looks after any more: they hold memory, GPUs and ports."""

from __future__ import annotations

import os
from typing import Any

PROGRAMS = ("labutils.launch.", "torch.distributed.run", "torchrun")
"""What the command line of a launcher holds."""
VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_PORT"}
"""What the environment of a rank holds, whoever has started it."""
_INITS = {"init", "systemd", "tini", "docker-init", "dumb-init", "catatonit", "launchd"}


def leftovers() -> list[Any]:
    """Processes of this user (as ``psutil.Process``) that are ranks or their launchers, orphaned.

    A process is an orphan when the system's first process has taken it over.
    """
    import psutil

    return [process for process in psutil.process_iter() if _is_left(process)]


def _is_left(process: Any) -> bool:
    import psutil

    try:
        if process.pid == os.getpid() or not _same_user(process) or not _is_orphan(process):
            return False
        command = " ".join(process.cmdline())
        return any(name in command for name in PROGRAMS) or set(process.environ()) >= VARIABLES
    except (psutil.Error, OSError):  # it has gone, or is none of our business
        return False


def _same_user(process: Any) -> bool:
    return not hasattr(os, "getuid") or bool(process.uids().real == os.getuid())


def _is_orphan(process: Any) -> bool:
    parent = process.parent()
    if parent is None:
        return bool(process.pid != 1)
    # In a container the first process may be the notebook server, with children of its own.
    first = parent.pid == 1 and "jupyter" not in " ".join(parent.cmdline())
    return bool(first or parent.name() in _INITS)
