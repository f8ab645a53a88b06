"""Overlap: each gradient's all-reduce begins while the backward pass goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from labutils import graded_backward

lab = "04"
compare = graded_backward.compare


def reduce_when_ready(module: nn.Module) -> None:
    ranks, works = dist.get_world_size(), []
    parameters = list(module.parameters())

    def ready(parameter: torch.Tensor) -> None:
        parameter.grad /= ranks
        works.append(dist.all_reduce(parameter.grad, async_op=True))
        if len(works) == len(parameters):  # that was the last gradient of this backward pass
            for work in works:
                work.wait()
            works.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)


def job(answer: Callable[[nn.Module], object], layers: int) -> dict[str, object]:
    """In a rank: gradients after two passes, and when their all-reduces began."""
    return graded_backward.backward(answer, None, layers)


def run(answer: Callable[[nn.Module], object], ranks: int, layers: int) -> list[object]:
    """What each rank holds afterwards."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, layers), timeout=8, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 2), (3, rng.randint(2, 3))]


hints = [
    "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) as soon as parameter.grad "
    "is complete, in the middle of backward().",
    "In the hook, divide the gradient and start its all-reduce with async_op=True: it returns a "
    "handle at once. Keep the handles in a list.",
    "Somebody has to wait for them before backward() returns: the hook that finds as many handles "
    "as there are parameters was the last; it calls wait() on each and empties the list.",
]
