"""Gradient accumulation under DDP: one synchronisation for several backward passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labutils import graded_backward

lab = "04"
compare = graded_backward.compare

Batch = tuple[torch.Tensor, torch.Tensor]


def accumulate_gradients(ddp: nn.Module, batches: list[Batch]) -> None:
    *first, last = batches
    for x, y in first:
        with ddp.no_sync():
            (F.cross_entropy(ddp(x), y) / len(batches)).backward()
    x, y = last
    (F.cross_entropy(ddp(x), y) / len(batches)).backward()


def job(answer: Callable[[nn.Module, list[Batch]], object], passes: int) -> dict[str, object]:
    """In a rank: the gradient of so many equal batches, and how often it was synchronised."""
    module, reduced = graded_backward.network(2), []
    ddp = DistributedDataParallel(module)

    def counting(_: object, bucket: Any) -> Any:
        reduced.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, counting)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(3, 4, generator=generator), torch.randint(0, 4, (3,), generator=generator))
        for _ in range(passes)
    ]
    answer(ddp, batches)
    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
    return graded_backward.Seen({"gradients": [gradient], "all-reduces": [len(reduced)]})


def run(answer: Callable[..., object], ranks: int, passes: int) -> list[object]:
    """What each rank holds afterwards."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, passes), timeout=8, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 3), (3, rng.randint(2, 4))]


hints = [
    "Gradients add up over backward passes by themselves; divide each loss by the number of "
    "batches, so that the sum is a mean.",
    "with ddp.no_sync(): switches synchronisation off for the passes inside.",
    "DDP decides in the forward whether the backward will synchronise: forward and backward belong "
    "inside the block, both.",
    "The last pass stays outside: it synchronises the sum.",
]
