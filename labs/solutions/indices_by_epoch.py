"""The indices that a rank sees in each epoch: shuffled anew every time."""

from __future__ import annotations

import random
from collections.abc import Iterator

from torch.utils.data import DistributedSampler

lab = "06"


def indices_by_epoch(sampler: DistributedSampler[int], epochs: int) -> list[list[int]]:
    indices = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        indices.append(list(sampler))
    return indices


def run(answer: object, samples: int, ranks: int, epochs: int) -> list[list[list[int]]]:
    """For each rank: its indices in each epoch."""
    samplers = [DistributedSampler(range(samples), ranks, rank) for rank in range(ranks)]
    return [answer(sampler, epochs) for sampler in samplers]  # type: ignore[operator]


def cases(rng: random.Random) -> Iterator[tuple[int, int, int]]:
    yield from [(4, 2, 2), (10, 2, 3), (rng.randint(20, 30), 3, 4)]


hints = [
    "The sampler shuffles by its seed and its epoch; the epoch stays 0 until somebody sets it.",
    "sampler.set_epoch(epoch), from 0 on, before the sampler is read in that epoch.",
]
