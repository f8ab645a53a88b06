"""Time per batch of a loader with W workers beside a training step."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "01"


def seconds_per_batch(workers: int, load: float, overhead: float, step: float) -> float:
    if workers == 0:
        return load + step
    return max(load / workers + overhead, step)


def cases(rng: random.Random) -> Iterator[tuple[int, float, float, float]]:
    yield from [
        (0, 0.1, 0.01, 0.05),
        (1, 0.1, 0.01, 0.05),
        (2, 0.1, 0.01, 0.05),
        (8, 0.1, 0.0, 0.05),
    ]
    for _ in range(12):
        yield rng.randint(0, 16), rng.uniform(0, 1), rng.uniform(0, 0.02), rng.uniform(0, 0.3)


hints = [
    "Without workers the process loads, then trains: two times one after the other.",
    "W workers together finish a batch every load / W seconds; handing it over comes on top.",
    "With workers, loading and training go on side by side: which of the two decides?",
]
