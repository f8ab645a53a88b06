"""How many samples a second do all GPUs train on together?"""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "00"


def throughput(samples_per_gpu: int, gpus: int, step_s: float) -> float:
    return samples_per_gpu * gpus / step_s


def cases(rng: random.Random) -> Iterator[tuple[int, int, float]]:
    yield from [(32, 1, 0.5), (32, 4, 0.5), (64, 2, 0.1)]
    yield rng.randint(1, 256), rng.randint(2, 8), rng.randint(1, 50) / 100


hints = [
    "In one step, every GPU trains on samples_per_gpu samples.",
    "All samples of a step, divided by the seconds that the step takes.",
]
