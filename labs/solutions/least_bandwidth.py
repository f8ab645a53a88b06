"""The bandwidth from which a second node is worth having."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "05"


def least_bandwidth(nbytes: int, seconds: float) -> float:
    return 8 * nbytes / seconds


def cases(rng: random.Random) -> Iterator[tuple[int, float]]:
    yield from [(1_000_000, 1.0), (1_000_000, 0.1), (100_000_000, 0.5)]
    for _ in range(8):
        yield rng.randrange(10**6, 10**9), rng.uniform(0.01, 2.0)


hints = [
    "Over two nodes a step takes seconds + the time of the all-reduce, and does twice the samples.",
    "Twice the samples in less than twice the time: so the all-reduce must take less than seconds.",
    "On two nodes each sends 2 * (2 - 1) / 2 = 1 times the gradient: nbytes. In bits per second.",
]
