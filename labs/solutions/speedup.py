"""How many times faster than one GPU are several?"""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "00"


def speedup(one_gpu: float, many_gpus: float) -> float:
    return many_gpus / one_gpu


def cases(rng: random.Random) -> Iterator[tuple[float, float]]:
    yield from [(100.0, 200.0), (100.0, 390.0), (250.0, 240.0)]
    yield float(rng.randint(50, 500)), float(rng.randint(500, 2000))


hints = ["Both arguments are throughputs, in samples a second: more is faster."]
