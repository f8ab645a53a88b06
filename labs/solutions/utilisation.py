"""During which share of the time is a lane of the timeline busy?"""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "00"


def utilisation(bars: list[tuple[float, float]], start: float, end: float) -> float:
    busy, covered_until = 0.0, start
    for left, right in sorted(bars):
        left, right = max(left, covered_until), min(right, end)
        busy += max(0.0, right - left)
        covered_until = max(covered_until, right)
    return busy / (end - start)


def cases(rng: random.Random) -> Iterator[tuple[list[tuple[float, float]], float, float]]:
    yield [], 0.0, 1.0
    yield [(0.0, 1.0), (2.0, 3.0)], 0.0, 4.0
    yield [(2.0, 3.0), (0.0, 1.0)], 0.0, 4.0
    yield [(0.0, 2.0), (1.0, 3.0)], 0.0, 4.0
    yield [(0.0, 4.0), (1.0, 2.0)], 0.0, 8.0
    yield [(0.0, 4.0), (1.0, 2.0), (3.0, 4.0)], 0.0, 8.0
    yield [(-1.0, 1.0), (3.0, 9.0)], 0.0, 4.0
    lefts = [float(rng.randint(0, 20)) for _ in range(5)]
    yield [(left, left + rng.randint(1, 5)) for left in lefts], 2.0, 18.0


hints = [
    "Go through the bars from left to right (sorted), and add up how long each of them is.",
    "Bars may overlap: count from where the lane is covered already, not from the bar's own left.",
    "Only what lies between start and end counts, and the sum is divided by end - start.",
]
