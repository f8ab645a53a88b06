"""A step with the lab's DDP of forty lines beside a step with PyTorch's, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labutils as lab
from labutils import exercises
from labutils.timing import ddp

RANKS, BATCH, BUCKET_MB = 2, 32, 25.0

Groups = list[list[nn.Parameter]]
Reduce = Callable[[Groups], object]


def groups(module: nn.Module, limit_mb: float) -> Groups:
    """The parameters by bucket, from the last to the first."""
    order = list(reversed(list(module.parameters())))
    return [[order[i] for i in group] for group in ddp.buckets(order, limit_mb, limit_mb)]


def times(reduce_in_buckets: Reduce, repeats: int = 25) -> tuple[float, float]:
    """In a rank: median seconds of a ResNet-20 step with each of the two, taken in turn."""
    theirs, ours = (lab.models.create("resnet_small") for _ in range(2))
    wrapped = DistributedDataParallel(theirs, bucket_cap_mb=BUCKET_MB)
    reduce_in_buckets(groups(ours, BUCKET_MB))
    steps = [_step(wrapped, theirs), _step(ours, ours)]
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for kept, step in zip(seconds, steps):
            dist.barrier()
            start = time.perf_counter()
            step()
            kept.append(time.perf_counter() - start)
    first, second = (median(kept[3:]) for kept in seconds)  # DDP rebuilds its buckets at first
    return first, second


def _step(call: Any, module: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()

    return step


def measure() -> list[tuple[str, float, float]]:
    """(name, value, upper bound): step time over PyTorch's, gloo on two ranks."""
    reference = exercises._load("reduce_in_buckets").function
    run = lab.launch(times, RANKS, args=(reference,), checked=False, record=False)
    torchs, ours = (max(column) for column in zip(*run.results))
    return [("ResNet-20 step, DDP of forty lines / torch DDP", ours / torchs, 1.25)]
