"""Accumulate gradients over micro-batches and synchronise once, with the last."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

lab = "06"


def accumulate(ddp: DistributedDataParallel, micro_batches: list[torch.Tensor]) -> None:
    last = len(micro_batches) - 1
    for i, x in enumerate(micro_batches):
        with contextlib.nullcontext() if i == last else ddp.no_sync():
            loss = ddp(x).square().mean() / len(micro_batches)
            loss.backward()


def job(answer: Callable[..., None], count: int) -> dict[str, Any]:
    """In a rank: the gradient after ``count`` micro-batches, and how often it was averaged."""
    rank, calls, at_once = dist.get_rank(), [], []
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model.register_forward_hook(lambda _, inputs, __: at_once.append(len(inputs[0])))
    ddp = DistributedDataParallel(model)

    def counting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())

    ddp.register_comm_hook(None, counting)
    answer(ddp, [torch.arange(4.0).view(2, 2) + i + rank for i in range(count)])
    return {"gradient": model.weight.grad, "all-reduces": len(calls), "samples at once": at_once}


def run(answer: Callable[..., None], ranks: int, count: int) -> list[Any]:
    """What each rank has afterwards."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, count), timeout=10, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 2), (3, rng.randint(3, 5))]


hints = [
    "DDP decides in *forward* whether the coming backward will synchronise.",
    "Forward and backward of all micro-batches but the last belong inside `with ddp.no_sync():`.",
    "Divide each loss by the number of micro-batches, so that the sum is the mean.",
]
