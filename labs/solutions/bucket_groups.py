"""Which gradients share a bucket: DDP's rule."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "04"


def bucket_groups(sizes: list[int], limit: int) -> list[list[int]]:
    groups, group, held = [], [], 0
    for index, size in enumerate(sizes):
        group.append(index)
        held += size
        if held >= limit:
            groups.append(group)
            group, held = [], 0
    return groups + [group] if group else groups


def cases(rng: random.Random) -> Iterator[tuple[list[int], int]]:
    yield from [([1], 1), ([1, 1, 1], 2), ([5, 1, 1], 3), ([2, 2, 2, 2], 4), ([1, 2], 0)]
    for _ in range(6):
        yield [rng.randint(1, 9) for _ in range(rng.randint(1, 12))], rng.randint(0, 20)


hints = [
    "Go through the sizes in order and keep the indices of the open bucket, and its bytes.",
    "A bucket is closed once it has reached the limit, so it may be larger than that: the tensor "
    "that reaches it still belongs to it.",
    "What is left at the end is a bucket too, unless nothing is left.",
]
