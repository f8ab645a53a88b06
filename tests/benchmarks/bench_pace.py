"""Virtual GPUs in real time, on a machine whose cores are all taken by other processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import labutils as lab
from labutils.timing import cost, profiles
from labutils.virtual.state import state

PROFILE = "V100-SXM2-32GB"
SECONDS = 2.0
BATCH = 256


def measure() -> list[tuple[str, float, float]]:
    """(name, value, upper bound) of each."""
    lab.virtual.enable(1, profile=PROFILE, pace="wall")
    try:
        with _loaded():
            return [*_training(), _waiting()]
    finally:
        lab.virtual.disable()


@contextlib.contextmanager
def _loaded() -> Iterator[None]:
    """A process for each core that does nothing but use it."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _training() -> list[tuple[str, float, float]]:
    model = lab.models.create("resnet50").to("vgpu:0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(BATCH, 3, 224, 224, device="vgpu:0")
    y = torch.randint(0, 1000, (BATCH,), device="vgpu:0")

    def steps(count: int) -> float:
        """Seconds from the first launch to the end of the last step."""
        torch.vgpu.synchronize()
        start = time.monotonic()
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        torch.vgpu.synchronize()
        return time.monotonic() - start

    steps(1)
    mark = state.recorder.count
    count = max(1, round(SECONDS / steps(1)))
    step = _by_profile(mark)
    with lab.watch("training", show=False) as w:
        wall = steps(count)
    busy = w.trace.busy("GPU 0")
    return [
        ("ResNet-50, 2 s: |GPU busy time / the profile's - 1|", _off(busy, count * step), 0.03),
        ("ResNet-50, 2 s: |measured time / the profile's - 1|", _off(wall, count * step), 0.03),
    ]


def _by_profile(mark: int) -> float:
    """Seconds of device time of the operations recorded since ``mark``, by the cost model alone."""
    profile = profiles.load(PROFILE)
    entries, _ = state.recorder.since(mark)
    return sum(cost.kernel_seconds(e.kernel, profile) for e in entries if e.kernel)


def _off(value: float, expected: float) -> float:
    return abs(value / expected - 1)


def _waiting() -> tuple[str, float, float]:
    """A thread that waits for the device leaves the CPU to others."""
    a = torch.empty(8192, 8192, device="vgpu:0")
    used, start = time.process_time(), time.monotonic()
    while time.monotonic() - start < SECONDS:
        a @ a
        torch.vgpu.synchronize()
    share = (time.process_time() - used) / (time.monotonic() - start)
    return "CPU time of a loop of large products, as a share", share, 0.03
