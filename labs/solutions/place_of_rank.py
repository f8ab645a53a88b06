"""The node and the local rank of a process, from its rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

lab = "05"


def place_of_rank(rank: int, gpus: int) -> tuple[int, int]:
    return rank // gpus, rank % gpus


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(0, 3), (4, 3), (2, 3), (13, 8), (31, 8), (5, 1)]
    for _ in range(8):
        gpus = rng.randint(1, 8)
        yield rng.randrange(16 * gpus), gpus


hints = [
    "Ranks are counted through one node after the other: node 0 has ranks 0 to gpus - 1.",
    "How many full nodes lie before this rank? And how many ranks of its own node?",
    "rank = node_rank * gpus + local_rank: a division with remainder takes that apart.",
]
