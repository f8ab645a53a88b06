"""What ``DistributedSampler(shuffle=False)`` gives to a rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "04"


def sampler_indices(length: int, ranks: int, rank: int) -> list[int]:
    each = -(-length // ranks)  # rounded up
    padded = [index % length for index in range(each * ranks)]
    return padded[rank::ranks]


def cases(rng: random.Random) -> Iterator[tuple[int, int, int]]:
    yield from [(4, 2, 0), (4, 2, 1), (5, 2, 1), (10, 4, 3), (1, 3, 2)]
    for _ in range(8):
        ranks = rng.randint(1, 8)
        yield rng.randint(1, 40), ranks, rng.randrange(ranks)


hints = [
    "Every rank gets equally many indices: length / ranks, rounded up.",
    "Where the division leaves a rest, indices from the start are used again.",
    "They are dealt like cards: rank r gets number r, r + ranks, r + 2 ranks, …",
]
