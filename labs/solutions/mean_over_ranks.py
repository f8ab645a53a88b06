"""The mean over all samples of all ranks, where ranks have different numbers of samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

lab = "03"


def mean_over_ranks(values: torch.Tensor) -> float:
    both = torch.tensor([values.sum(), float(len(values))])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def job(mean: Callable[[torch.Tensor], float], sizes: list[int]) -> float:
    """In a rank: its share of the values, and the mean that ``mean`` makes of them."""
    rank = dist.get_rank()
    start = sum(sizes[:rank])
    return mean(torch.arange(start, start + sizes[rank], dtype=torch.float32) ** 2)


def run(answer: Callable[[torch.Tensor], float], sizes: list[int]) -> list[float]:
    """What each rank says."""
    import labutils

    done = labutils.launch(job, len(sizes), args=(answer, sizes), timeout=5, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[list[int]]]:
    yield from [([2, 2],), ([3, 1],), ([rng.randint(1, 9) for _ in range(4)],)]


hints = [
    "The mean of the ranks' means is wrong where the ranks have different numbers of values.",
    "Two numbers are to be summed over the ranks: the sum of the values, and how many there are.",
    "Put both into one tensor, all_reduce it, and divide on every rank.",
]
