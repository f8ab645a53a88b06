"""A rank's loss, such that DDP's mean over the ranks is the mean over all tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

lab = "06"


def loss_for_ddp(token_losses: torch.Tensor) -> torch.Tensor:
    tokens = torch.tensor(float(len(token_losses)))
    dist.all_reduce(tokens)
    return token_losses.sum() * dist.get_world_size() / tokens


def job(answer: Callable[[torch.Tensor], torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """In a rank: the gradient after a backward on its own number of tokens."""
    rank = dist.get_rank()
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    ddp = DistributedDataParallel(model)
    x = torch.arange(2.0 * tokens[rank]).view(-1, 2) / 10 + rank
    answer(ddp(x).squeeze(1) ** 2).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def run(answer: Callable[[torch.Tensor], torch.Tensor], tokens: list[int]) -> list[torch.Tensor]:
    """The gradient on each rank; ``tokens`` has one number per rank."""
    import labutils

    done = labutils.launch(job, len(tokens), args=(answer, tokens), timeout=10, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[list[int]]]:
    yield from [([1, 3],), ([2, 2],), ([rng.randint(1, 4), rng.randint(5, 9), 2],)]


hints = [
    "DDP adds up the ranks' gradients and divides by the world size.",
    "Wanted: the sum of all token losses over the number of all tokens; all_reduce that number.",
    "Multiply by the world size what DDP will divide by it: sum * world size / all tokens.",
]
