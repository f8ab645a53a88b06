"""Write a checkpoint once, whole or not at all, and let nobody read it before it is there."""

from __future__ import annotations

import io
import os
import random
import tempfile
import time
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
    """In a rank: how often it saves, and what it reads as soon as it may."""
    saved, removed, save, remove = [], [], torch.save, os.remove

    def slow(*args: Any, **kwargs: Any) -> None:
        saved.append(1)
        time.sleep(0.05)  # a large model, a busy file system
        save(*args, **kwargs)

    def watched(file: Any, *args: Any, **kwargs: Any) -> None:
        removed.extend([1] * (os.fspath(file) == path))
        remove(file, *args, **kwargs)

    torch.manual_seed(features)
    ddp = DistributedDataParallel(nn.Linear(features, 1))
    torch.save, os.remove, os.unlink = slow, watched, watched
    try:
        answer(ddp, path)
    finally:
        torch.save, os.remove, os.unlink = save, remove, remove
    return {"saves": len(saved), "removed": len(removed), "file": Path(path).read_bytes()}


def run(answer: Callable[..., None], ranks: int, features: int) -> dict[str, Any]:
    """What the ranks wrote, what each read, and what became of the checkpoint before it."""
    import labutils

    with tempfile.TemporaryDirectory() as folder:
        path, before = Path(folder) / "checkpoint.pt", b"the checkpoint before this one"
        path.write_bytes(before)
        with path.open("rb") as reader:  # somebody has begun to read it
            arguments = (answer, str(path), features)
            done = labutils.launch(job, ranks, args=arguments, timeout=10, record=False)
            undisturbed = reader.read() == before
        files = sorted(os.listdir(folder))
    return {
        "torch.save on all ranks together": sum(rank["saves"] for rank in done.results),
        "who reads the file before keeps it whole": undisturbed,
        "there is a checkpoint at any moment": not any(rank["removed"] for rank in done.results),
        "each rank reads": [contents(rank["file"], before) for rank in done.results],
        "files": files,
    }


def contents(data: bytes, before: bytes) -> Any:
    """What is in a file that was read."""
    if data == before:
        return "still the checkpoint before"
    try:
        return torch.load(io.BytesIO(data))
    except Exception as error:
        return f"cannot be read: {type(error).__name__}"


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 3), (3, rng.randint(4, 9))]


hints = [
    "The replicas are equal: one rank writes, rank 0.",
    "Write beside the path, then os.replace: readers see the old file or the new one, whole.",
    "ddp.module.state_dict() has no 'module.' in its keys.",
    "The others must not go on before the file is there: dist.barrier(), on every rank.",
]
