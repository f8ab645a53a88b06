"""DDP's core: gradients in buckets, each reduced as soon as its last gradient is there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from labutils import graded_backward

lab = "04"
compare = graded_backward.compare


def reduce_in_buckets(groups: list[list[nn.Parameter]]) -> None:
    share = 1 / dist.get_world_size()
    buckets = [torch.cat([p.detach().flatten() for p in group]) for group in groups]
    place = {}  # parameter -> number of its bucket, its part of that bucket
    for number, group in enumerate(groups):
        parts = buckets[number].split([p.numel() for p in group])
        place |= {p: (number, part.view_as(p)) for p, part in zip(group, parts)}
    missing, works = [len(group) for group in groups], []

    def ready(parameter: torch.Tensor) -> None:
        number, part = place[parameter]
        torch.mul(parameter.grad, share, out=part)
        parameter.grad = part  # the gradient lives in the bucket now
        missing[number] -= 1
        if missing[number] == 0:
            works.append(dist.all_reduce(buckets[number], async_op=True))
        if len(works) == len(groups):  # that was the last gradient of this backward pass
            for work in works:
                work.wait()
            works.clear()
            missing[:] = [len(group) for group in groups]

    for parameter in place:
        parameter.register_post_accumulate_grad_hook(ready)


def job(answer: Callable[[list[list[nn.Parameter]]], object], sizes: Sequence[int]) -> object:
    """In a rank: gradients after two passes, and when their all-reduces began."""

    def prepare(module: nn.Module) -> None:
        order = list(reversed(list(module.parameters())))
        answer([[order.pop(0) for _ in range(size)] for size in sizes])

    return graded_backward.backward(prepare, None, sum(sizes) // 2)


def run(answer: Callable[..., object], ranks: int, sizes: Sequence[int]) -> list[object]:
    """What each rank holds afterwards."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, sizes), timeout=8, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, tuple[int, ...]]]:
    yield from [(2, (2,)), (2, (1, 3)), (3, (2, rng.randint(1, 2) * 2))]


hints = [
    "A bucket is one flat tensor. bucket.split([p.numel() for p in group]) gives views of its "
    "parts; part.view_as(p) has the shape of the parameter, and writing to it writes the bucket.",
    "In the hook: write the gradient, divided by the number of ranks, into its part of the bucket, "
    "and count down how many gradients that bucket still misses.",
    "At zero, start one all-reduce of the whole bucket with async_op=True.",
    "The hook that has started the last bucket waits for all of them and sets the counters back. "
    "The results must end up in parameter.grad: copy them, or let parameter.grad be the part.",
]
