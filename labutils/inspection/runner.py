"""What runs a user's script in a rank, and watches it."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist

from labutils.inspection.data import DataObserver
from labutils.inspection.facts import Facts, facts_file, where
from labutils.inspection.training import TrainingObserver


def run_observed(script: str, arguments: list[str], directory: str) -> None:
    """Run ``script`` as ``__main__``; what is seen of it goes into ``directory``."""
    facts = Facts(facts_file(directory, int(os.environ["RANK"])))
    data = DataObserver(facts)
    data.install()
    TrainingObserver(facts, data).install()
    _watch_start(facts)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        facts.data["ended"] = True
        facts.write()


def _watch_start(facts: Facts) -> None:
    """How the script joins, or starts, its processes."""
    init, spawn = dist.init_process_group, torch.multiprocessing.spawn

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **more: Any) -> None:
        facts.add("groups", what="made", backend=str(backend), where=where())
        if backend == "nccl" and not torch.cuda.is_available():
            backend = "gloo"
        init(backend, *args, **more)

    @functools.wraps(spawn)
    def spawned(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> None:
        """The processes are there already: each does what its number would have done."""
        facts.add("spawns", nprocs=nprocs, where=where())
        rank = int(os.environ["RANK"])
        if rank < nprocs:
            fn(rank, *args)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
    torch.multiprocessing.spawn = spawned  # type: ignore[assignment]
