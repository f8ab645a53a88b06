"""Steps over a shaped network, measured, beside those that ``predict`` gives for its bandwidth.

Needs network namespaces (root on Linux); elsewhere it reports that it could not measure.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import labutils as lab
from labutils.launch import network
from labutils.timing import rehearsed

BANDWIDTHS = ("100mbit", "200mbit", "400mbit")
STEPS = 5

Case = tuple[nn.Module, Tensor, Tensor]


def mlp() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    return model, torch.randn(32, 256), torch.randint(10, (32,))


def cnn() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip
    return model, torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def steps(make: Callable[[], Case]) -> dict[str, Any]:
    """In a rank: what the machine computes, and the fastest step over each bandwidth."""
    found: dict[str, Any] = {"rates": rehearsed.rates()}
    model, x, y = make()
    ddp = DistributedDataParallel(model)
    optimizer = sgd(ddp.parameters())
    for bandwidth in BANDWIDTHS:
        network.limit(bandwidth)
        times = []
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        found[bandwidth] = min(times)
    return found


def measure() -> list[tuple[str, float, float]]:
    """(name, value, upper bound): how far measured and predicted steps are apart, as a share."""
    if network.missing():
        print(network.missing())
        return [("a shaped network to measure", float("nan"), 0.15)]
    rows = []
    for make in (mlp, cnn):
        run = lab.launch(steps, nodes=2, ranks=1, args=(make,), network="namespaces",
                         bandwidth="1gbit", timeout=60, checked=False, record=False)  # fmt: skip
        measured = run.results[0]
        model, x, y = make()
        for bandwidth in BANDWIDTHS:
            with tempfile.TemporaryDirectory() as folder:
                hardware = rehearsed.profile(measured["rates"], bandwidth, None, folder)
                predicted = lab.predict(model, len(x), nodes=2, profile=hardware, example=(x, y),
                                        optimizer=sgd).step_s  # fmt: skip
            apart = abs(measured[bandwidth] / predicted - 1)
            rows.append((f"step of {make.__name__} at {bandwidth}, measured / predicted - 1",
                         apart, 0.15))  # fmt: skip
    return rows
