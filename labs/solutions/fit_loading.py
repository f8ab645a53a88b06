"""The two unknowns of the loading model from loading times with one and with two workers."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "01"


def fit_loading(with_1: float, with_2: float) -> tuple[float, float]:
    load = 2 * (with_1 - with_2)
    return load, with_1 - load


def cases(rng: random.Random) -> Iterator[tuple[float, float]]:
    yield from [(0.11, 0.06), (1.0, 0.5)]
    for _ in range(10):
        load, overhead = rng.uniform(0.01, 1), rng.uniform(0, 0.1)
        yield load + overhead, load / 2 + overhead


hints = [
    "Write the model down twice: with_1 = load + overhead, with_2 = load / 2 + overhead.",
    "Subtract the second from the first: the overhead is gone, and half of load is left.",
]
