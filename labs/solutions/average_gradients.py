"""Data parallelism at its simplest: one all-reduce per gradient, after the backward pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import nn

from labutils import graded_backward

lab = "04"
compare = graded_backward.compare


def average_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


def job(answer: Callable[[nn.Module], object], layers: int) -> dict[str, object]:
    """In a rank: gradients after the answer."""
    return graded_backward.backward(None, answer, layers)


def run(answer: Callable[[nn.Module], object], ranks: int, layers: int) -> list[object]:
    """What each rank holds afterwards."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, layers), timeout=8, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 2), (3, rng.randint(2, 3))]


hints = [
    "Go through module.parameters(); each has its gradient in .grad.",
    "dist.all_reduce(tensor) adds up, in place, on all ranks; nobody divides for you.",
    "Divide every gradient by dist.get_world_size(), before or after the all-reduce.",
]
