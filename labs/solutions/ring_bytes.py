"""Bytes that each rank sends in a ring all-reduce."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "03"


def ring_bytes(nbytes: int, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * nbytes


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(8, 2), (12, 3), (1024, 4), (64, 1)]
    for _ in range(10):
        ranks = rng.randint(2, 64)
        yield ranks * rng.randint(1, 1000), ranks


hints = [
    "The tensor is cut into as many chunks as there are ranks: each has nbytes / ranks bytes.",
    "In each step every rank sends one chunk. How many steps has the reduce-scatter? And the "
    "all-gather?",
]
