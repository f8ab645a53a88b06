"""What runs a user's script in a rank, and watches it."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from labutils.inspection.cuda import standing_in
from labutils.inspection.data import DataObserver
from labutils.inspection.facts import Facts, facts_file, where
from labutils.inspection.training import TrainingObserver
from labutils.launch.calls import user_lines


def run_observed(script: str, arguments: list[str], directory: str, virtual: bool) -> None:
    """Run ``script`` as ``__main__``; what is seen of it goes into ``directory``.

    With ``virtual``, virtual GPUs stand in for CUDA where there is none.
    """
    facts = Facts(facts_file(directory, int(os.environ["RANK"])))
    data = DataObserver(facts)
    data.install()
    TrainingObserver(facts, data).install()
    _watch_start(facts)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    gpus = standing_in() if virtual and not torch.cuda.is_available() else nullcontext()
    try:
        with gpus:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        facts.data["left"] = _raised_at(end)
    finally:
        facts.data["ended"] = True
        facts.write()


def _raised_at(error: BaseException) -> str:
    """The user's line at which it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    lines = user_lines(trace.tb_frame, limit=1) if trace is not None else []
    return lines[0] if lines else ""


def _watch_start(facts: Facts) -> None:
    """How the script joins, or starts, its processes."""
    init, spawn = dist.init_process_group, torch.multiprocessing.spawn
    gpus = torch.cuda.is_available()  # real ones
    meeting = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **more: Any) -> None:
        replaced = not gpus and "nccl" in str(backend)
        facts.add("groups", what="made", backend=str(backend), replaced=replaced, where=where())
        if replaced:
            backend, more = "gloo", {**more, "device_id": None}
        os.environ.update(meeting)  # scripts that start their own processes choose a port
        init(backend, *args, **more)

    @functools.wraps(spawn)
    def spawned(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> None:
        """The processes are there already: each does what its number would have done."""
        facts.add("spawns", nprocs=nprocs, where=where())
        world = int(os.environ["WORLD_SIZE"])
        if nprocs not in (0, world):
            raise ValueError(
                f"the script starts {nprocs} processes itself, but is inspected with {world} "
                f"ranks: use bring_your_own(..., ranks={nprocs})."
            )
        if nprocs:
            fn(int(os.environ["RANK"]), *args)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
    torch.multiprocessing.spawn = spawned
