"""Steps that a failure costs, where there is a checkpoint every so many steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "05"


def steps_lost(failures: list[int], every: int) -> int:
    return sum(step % every for step in failures)


def cases(rng: random.Random) -> Iterator[tuple[list[int], int]]:
    yield from [([8], 3), ([9], 3), ([], 5), ([2], 5), ([7, 12], 5)]
    for _ in range(8):
        every = rng.randint(1, 20)
        yield [rng.randint(1, 200) for _ in range(rng.randint(1, 4))], every


hints = [
    "After step 8, with checkpoints at steps 3 and 6: which steps have to be done again?",
    "The steps since the last multiple of every: a remainder.",
    "Each failure costs its own; add them up.",
]
