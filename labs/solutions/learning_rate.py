"""Linear scaling with gradual warm-up (Goyal et al. 2017, sections 2.1 and 2.2)."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "04"


def learning_rate(step: int, warmup: int, rate: float, factor: float) -> float:
    target = rate * factor
    if step >= warmup:
        return target
    return rate + (target - rate) * step / warmup


def cases(rng: random.Random) -> Iterator[tuple[int, int, float, float]]:
    yield from [(0, 5, 0.1, 4.0), (5, 5, 0.1, 4.0), (0, 0, 0.1, 8.0), (1, 4, 0.1, 3.0)]
    for _ in range(8):
        yield rng.randint(0, 20), rng.randint(0, 20), rng.uniform(0.01, 1), rng.uniform(1, 64)


hints = [
    "After the warm-up the rate is rate * factor.",
    "The warm-up begins at step 0 with the rate that was good for the small batch.",
    "In between it grows by the same amount in every step: a straight line from rate to "
    "rate * factor. Mind warmup = 0.",
]
