"""What virtual GPUs cost, as ratios within one run."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labutils import models, virtual
from labutils.timing import profiles
from labutils.timing.schedule import schedule
from labutils.virtual.record import Graph
from labutils.virtual.state import state

Rows = list[tuple[str, float, float]]


class _Empty(TorchDispatchMode):
    """The least that any device in Python does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def measure() -> Rows:
    """(name, value, upper bound) of each."""
    virtual.enable(4)
    try:
        return [*_steps(), _one_operation(), *_phantom()]
    finally:
        virtual.disable()


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _ratio(slow: Callable[[], object], fast: Callable[[], object], pairs: int) -> float:
    """Median over interleaved pairs, so that other load meets both alike."""
    slow(), fast()
    return statistics.median(_seconds(slow) / _seconds(fast) for _ in range(pairs))


def _step(model: nn.Module, device: str | None, send: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    if device:
        x, y = (x.to(device) if send else x), y.to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _steps() -> Rows:
    plain = models.create("resnet_small")
    one = copy.deepcopy(plain).to("vgpu:0")
    four = nn.DataParallel(copy.deepcopy(plain).to("vgpu:0"))
    cpu = _step(plain, None, send=False)
    alone, shared = _step(one, "vgpu:0", send=True), _step(four, "vgpu:0", send=False)
    return [
        ("ResNet-20 step, one virtual GPU / CPU", _ratio(alone, cpu, 15), 1.3),
        ("ResNet-20 step, DataParallel on 4 / CPU", _ratio(shared, cpu, 15), 2.0),
    ]


def _one_operation() -> tuple[str, float, float]:
    a = torch.ones(8)
    b = a.to("vgpu:0")

    def empty() -> None:
        with _Empty():
            for _ in range(2000):
                a + a

    def ours() -> None:
        for _ in range(2000):
            b + b

    return "8-element add / under an empty TorchDispatchMode", _ratio(ours, empty, 15), 4.0


def _phantom() -> Rows:
    virtual.enable(1, compute="phantom")
    model = models.create("resnet50").to("vgpu:0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(256, 3, 224, 224, device="vgpu:0")
    y = torch.randint(0, 1000, (256,), device="vgpu:0")
    profile = profiles.load(state.profile)

    def steps(count: int) -> Callable[[], None]:
        def run() -> None:
            mark = state.recorder.count
            for _ in range(count):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            entries, _ = state.recorder.since(mark)
            schedule(Graph(entries, first=mark, devices=1), profile)

        return run

    first = _seconds(steps(1))
    doubling = _ratio(steps(8), steps(4), 5) / 2
    log = state.recorder.log
    limit = log.maxlen or 0
    return [
        ("ResNet-50 phantom step (batch 256), recorded and scheduled, s", first, 2.0),
        ("time of 8 phantom steps / twice that of 4", doubling, 1.25),
        ("entries in the recorder's log / its bound", len(log) / limit, 1.0),
    ]
