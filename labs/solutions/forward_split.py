"""Call a DataParallel model with a batch object, so that the batch is split."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

lab = "06"


@dataclass
class Batch:
    """Images and their weights, in an object of one's own."""

    images: torch.Tensor
    weights: torch.Tensor


def forward_split(parallel: nn.DataParallel, batch: Batch) -> torch.Tensor:  # type: ignore[type-arg]
    output: torch.Tensor = parallel(batch.images, batch.weights)
    return output


class Weighted(nn.Module):
    """Takes images and weights as tensors, and notes how many it gets at once."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(2, 1, bias=False), seen
        nn.init.ones_(self.linear.weight)

    def forward(self, images: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(images))
        output: torch.Tensor = self.linear(images) * weights.unsqueeze(1)
        return output


def run(answer: Callable[..., torch.Tensor], samples: int, gpus: int) -> dict[str, object]:
    """The output, and how many samples each replica was given."""
    from labutils.devices import in_use

    seen: list[int] = []
    devices = in_use(gpus)
    model = Weighted(seen).to(devices[0])
    batch = Batch(torch.arange(2.0 * samples).view(-1, 2), torch.arange(float(samples)))
    output = answer(nn.DataParallel(model, device_ids=devices), batch)
    return {"output": output.detach().cpu(), "samples of each replica": sorted(seen)}


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(4, 2), (6, 2), (rng.randint(7, 12), 2)]


hints = [
    "scatter cuts tensors, also those in tuples, lists and dictionaries. Other objects are copied.",
    "The model takes tensors: parallel(batch.images, batch.weights).",
]
