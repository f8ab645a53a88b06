"""Bus bandwidth of an all-reduce, as nccl-tests defines it (doc/PERFORMANCE.md there)."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "03"


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    return nbytes / seconds * 2 * (ranks - 1) / ranks


def cases(rng: random.Random) -> Iterator[tuple[int, float, int]]:
    yield from [(100, 1.0, 2), (300, 2.0, 3)]
    for _ in range(10):
        yield rng.randint(1, 10**9), rng.uniform(1e-5, 1.0), rng.randint(2, 64)


hints = [
    "The algorithm bandwidth is simply nbytes / seconds.",
    "Each rank has to send 2 (ranks - 1) / ranks bytes for every byte of the tensor: multiply by "
    "that.",
]
