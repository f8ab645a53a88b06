"""One DDP module for everything that learns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

lab = "06"


class Whole(nn.Module):
    """A network and the temperature that divides its output."""

    def __init__(self, network: nn.Module, temperature: nn.Parameter) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.network(x) / self.temperature
        return output


def whole_model(network: nn.Module, temperature: nn.Parameter) -> nn.Module:
    return DistributedDataParallel(Whole(network, temperature))


def job(answer: Callable[..., nn.Module], features: int) -> list[torch.Tensor]:
    """In a rank: all parameters after two steps on data of its own."""
    torch.manual_seed(features)
    network, temperature = nn.Linear(features, 1), nn.Parameter(torch.tensor(2.0))
    learning = [*network.parameters(), temperature]
    model = answer(network, temperature)
    if not callable(model):
        raise TypeError(f"a module is wanted, not {model!r}")
    optimizer = torch.optim.SGD(learning, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.ones(2, features) * (dist.get_rank() + 1) + step
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in learning]


def run(answer: Callable[..., nn.Module], ranks: int, features: int) -> list[object]:
    """The parameters of each rank."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, features), timeout=10, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 1), (2, 2), (3, rng.randint(3, 5))]


hints = [
    "DDP averages gradients of the parameters of the module that it wraps, and of no others.",
    "Write a small nn.Module that has both the network and the temperature, and wrap that.",
    "Its forward is self.network(x) / self.temperature; __init__ registers the Parameter.",
]
