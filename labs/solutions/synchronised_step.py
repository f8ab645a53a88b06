"""The forward and backward of one training step with DDP."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

lab = "06"


def synchronised_step(
    ddp: DistributedDataParallel, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    loss = F.mse_loss(ddp(x), target)
    loss.backward()
    return loss.detach()


def job(answer: Callable[..., torch.Tensor], features: int) -> dict[str, torch.Tensor]:
    """In a rank: the loss of its own data, and the gradient afterwards."""
    torch.manual_seed(features)
    model = nn.Linear(features, 1, bias=False)
    ddp = DistributedDataParallel(model)
    x = torch.ones(3, features) + dist.get_rank()
    loss = answer(ddp, x, torch.zeros(3, 1))
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss is wanted as a tensor, not {loss!r}")
    assert model.weight.grad is not None
    return {"loss": loss.detach().clone(), "gradient": model.weight.grad}


def run(answer: Callable[..., torch.Tensor], ranks: int, features: int) -> list[object]:
    """What each rank has afterwards."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, features), timeout=10, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 2), (3, rng.randint(3, 5))]


hints = [
    "DDP prepares its reducer in its own forward: whoever calls ddp.module(x) goes around it.",
    "Call ddp(x), the mean squared error with the target, backward; return the loss.",
]
