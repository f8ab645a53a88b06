"""The mean loss over a batch, from the mean losses of its shards."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "02"


def mean_loss(losses: list[float], sizes: list[int]) -> float:
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


def cases(rng: random.Random) -> Iterator[tuple[list[float], list[int]]]:
    yield [1.0, 3.0], [2, 2]
    yield [1.0, 3.0], [3, 1]
    for _ in range(12):
        shards = rng.randint(1, 6)
        losses = [rng.uniform(0.1, 5.0) for _ in range(shards)]
        yield losses, [rng.randint(1, 9) for _ in range(shards)]


hints = [
    "losses[i] is already divided by sizes[i]: multiply back to get the sum over that shard.",
    "Add the sums of all shards, then divide once by the number of all samples.",
]
