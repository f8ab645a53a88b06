"""How ``scatter`` cuts a batch: shards of equal size, rounded up, until nothing is left."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

lab = "02"


def shard_sizes(batch: int, gpus: int) -> list[int]:
    size = math.ceil(batch / gpus)
    return [min(size, batch - start) for start in range(0, batch, size)]


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(8, 4), (10, 4), (9, 8), (3, 4), (1, 1)]
    for _ in range(20):
        yield rng.randint(1, 300), rng.randint(1, 16)


hints = [
    "scatter calls tensor.chunk(gpus): every shard but the last has the same size.",
    "That size is batch / gpus, rounded up: math.ceil(batch / gpus).",
    "Cut shards of that size until the batch is used up; there may be fewer shards than GPUs.",
]
