"""Write a checkpoint once, whole or not at all, and let nobody read it before it is there."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

lab = "06"


def save_checkpoint(ddp: DistributedDataParallel, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), f"{path}.new")
        os.replace(f"{path}.new", path)
    dist.barrier()


def job(answer: Callable[..., None], path: str, features: int) -> dict[str, Any]:
    """In a rank: what it wrote, and what it reads as soon as it may."""
    written: list[str] = []
    save = torch.save

    def slow(what: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        written.append(os.fspath(file) if isinstance(file, str | os.PathLike) else file.name)
        import time

        time.sleep(0.05)  # a large model, a busy file system
        save(what, file, *args, **kwargs)

    ddp = DistributedDataParallel(nn.Linear(features, 1))
    torch.save = slow
    try:
        answer(ddp, path)
    finally:
        torch.save = save
    there = os.path.exists(path)
    keys = list(torch.load(path)) if there else []
    straight = any(os.path.samefile(name, path) for name in written if os.path.exists(name))
    dist.barrier()
    return {
        "files written": len(written),
        "written straight to the path": straight,
        "there when the call returns": there,
        "keys": keys,
    }


def run(answer: Callable[..., None], ranks: int, features: int) -> dict[str, Any]:
    """What each rank saw, and what lies in the folder in the end."""
    import labutils

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkpoint.pt")
        done = labutils.launch(job, ranks, args=(answer, path, features), timeout=10, record=False)
        return {"ranks": list(done.results), "files": sorted(os.listdir(folder))}


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 3), (3, rng.randint(4, 9))]


hints = [
    "The replicas are equal: one rank writes, rank 0.",
    "Write beside the path, then os.replace: readers see the old file or the new one, whole.",
    "ddp.module.state_dict() has no 'module.' in its keys.",
    "The others must not go on before the file is there: dist.barrier(), on every rank.",
]
