"""What replication before every forward costs in traffic."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import nn

lab = "02"


def replication_bytes(module: nn.Module, gpus: int, steps: int) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return steps * (gpus - 1) * sum(t.numel() * t.element_size() for t in tensors)


def cases(rng: random.Random) -> Iterator[tuple[nn.Module, int, int]]:
    yield nn.Linear(2, 3, bias=False), 2, 1
    yield nn.Linear(2, 3), 4, 1
    yield nn.BatchNorm1d(4), 4, 10
    yield nn.Linear(5, 5), 1, 10
    yield nn.Linear(3, 3).to(torch.float16), 4, 2
    for _ in range(4):
        layers = [nn.Linear(rng.randint(1, 9), 4), nn.BatchNorm1d(4)]
        yield nn.Sequential(*layers), rng.randint(1, 8), rng.randint(1, 20)


hints = [
    "Parameters and buffers are both copied: module.parameters() and module.buffers().",
    "A tensor t takes t.numel() * t.element_size() bytes.",
    "GPU 0 has the originals, so gpus - 1 copies are made, and they are made anew in every step.",
]
