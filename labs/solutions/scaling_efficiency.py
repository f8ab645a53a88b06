"""Which share of the ideal speed-up is reached?"""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "00"


def scaling_efficiency(one_gpu: float, many_gpus: float, gpus: int) -> float:
    return many_gpus / (gpus * one_gpu)


def cases(rng: random.Random) -> Iterator[tuple[float, float, int]]:
    yield from [(100.0, 100.0, 1), (100.0, 200.0, 2), (100.0, 300.0, 4)]
    yield float(rng.randint(50, 500)), float(rng.randint(500, 2000)), rng.randint(2, 16)


hints = [
    "Ideally, N GPUs have N times the throughput of one.",
    "What is reached, divided by the ideal: 1.0 is perfect.",
]
