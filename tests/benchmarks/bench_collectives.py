"""The ring all-reduce of the lab on collectives beside gloo's own, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

import labutils as lab
from labutils import exercises

AllReduce = Callable[[torch.Tensor], object]
BYTES = 16 * 2**20


def first_attempt(x: torch.Tensor) -> None:
    """What a learner writes first: a blocking receive, and a fresh buffer in every step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = list(x.chunk(ranks))
    for s in range(2 * (ranks - 1)):
        received = torch.empty_like(chunks[0])
        sending = dist.isend(chunks[(rank - s) % ranks], (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)
        sending.wait()
        target = chunks[(rank - s - 1) % ranks]
        if s < ranks - 1:
            target += received
        else:
            target.copy_(received)


def times(functions: list[AllReduce], repeats: int = 25) -> list[float]:
    """In a rank: median seconds of each function, taken in turn."""
    x = torch.ones(BYTES // 4)
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for kept, function in zip(seconds, functions):
            dist.barrier()
            start = time.perf_counter()
            function(x)
            kept.append(time.perf_counter() - start)
    return [median(kept) for kept in seconds]


def gloo(x: torch.Tensor) -> None:
    """gloo's own all-reduce."""
    dist.all_reduce(x)


def measure() -> list[tuple[str, float, float]]:
    """(name, value, upper bound): time of a ring over gloo's own, 16 MiB on 4 ranks."""
    reference = exercises._load("ring_all_reduce").function
    functions = [gloo, reference, first_attempt]
    run = lab.launch(times, 4, args=(functions,), checked=False, record=False)
    own, solution, first = (max(column) for column in zip(*run.results))
    return [
        ("ring all-reduce, reference solution / gloo", solution / own, 1 / 0.8),
        ("ring all-reduce, a first attempt / gloo", first / own, 1 / 0.5),
    ]
