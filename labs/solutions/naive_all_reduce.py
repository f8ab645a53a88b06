"""All-reduce by way of rank 0: everyone sends to it, it adds up and sends the sum back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

lab = "03"


def naive_all_reduce(x: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        received = torch.empty_like(x)
        for source in range(1, dist.get_world_size()):
            dist.recv(received, source)
            x += received
        for target in range(1, dist.get_world_size()):
            dist.send(x, target)
    else:
        dist.send(x, 0)
        dist.recv(x, 0)


def job(all_reduce: Callable[[torch.Tensor], object], numbers: int) -> torch.Tensor:
    """In a rank: all-reduce ``numbers`` numbers that depend on the rank, in place."""
    rank = dist.get_rank()
    x = torch.arange(numbers, dtype=torch.float32) * (rank + 1) + 10 * rank
    all_reduce(x)
    return x


def run(answer: Callable[[torch.Tensor], object], ranks: int, numbers: int) -> dict[str, object]:
    """What each rank holds afterwards, and which other collectives were called."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, numbers), timeout=5)
    allowed = {"send", "recv", "isend", "irecv", "barrier"}
    calls = {s.name for s in done.trace.spans if s.lane == "communication" and s.kind != "wait"}
    return {"x": list(done.results), "other collectives": sorted(calls - allowed)}


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 2), (3, 4), (4, rng.randint(5, 40))]


hints = [
    "Rank 0 receives from every other rank in turn, and adds what it gets to x.",
    "dist.recv(buffer, source) overwrites the buffer: give it one of its own, torch.empty_like(x).",
    "Then rank 0 sends x to every other rank; these have sent theirs, and receive into x.",
]
