"""How many training steps can all ranks take together?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

lab = "06"


def common_steps(batches: int) -> int:
    fewest = torch.tensor(batches)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    return int(fewest)


def run(answer: Callable[[int], int], batches: list[int]) -> list[int]:
    """What each rank says; ``batches`` has one number per rank."""
    import labutils

    def job(each: list[int]) -> int:
        return answer(each[dist.get_rank()])

    done = labutils.launch(job, len(batches), args=(batches,), timeout=5, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[list[int]]]:
    yield from [([3, 2],), ([2, 3],), ([5, rng.randint(6, 9), 4],)]


hints = [
    "Each rank knows its own number only. Which collective lets all ranks know something of all?",
    "all_reduce can do more than add: op=dist.ReduceOp.MIN.",
]
