"""A measured step of ResNet-50 on this machine's GPU beside its prediction.

Run as a program it prints both; without a GPU it says that nothing was measured, and why.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labutils import models
from labutils.timing import profiles
from labutils.timing.measure import measure as measure_hardware
from labutils.timing.measured import toml
from labutils.timing.predict import predict

BATCH, STEPS, WARM_UP = 32, 30, 10
PRECISIONS = ("fp32", "amp")
NAMES = {
    "V100-SXM2": ("V100-SXM2",), "V100-PCIe": ("V100-PCIE",), "P100": ("P100",), "T4": ("T4",),
    "A100-SXM4-80GB": ("A100-SXM", "A100 80GB SXM"), "A100-PCIe": ("A100-PCIE", "A100 80GB PCIe"),
    "H100-SXM": ("H100 80GB HBM3", "H100-SXM"), "H200-SXM": ("H200",), "RTX-4090": ("RTX 4090",),
    "TITAN-RTX": ("TITAN RTX",), "2080-Ti": ("RTX 2080 Ti",),
}  # fmt: skip
"""What CUDA calls the GPUs of the profiles, in part."""


def measure() -> list[tuple[str, float, float]]:
    """Rows for ``python tests/benchmarks``: none where there is no GPU."""
    return [
        (f"ResNet-50, {precision}, on {profile}: predicted against measured, x",
         max(predicted / measured, measured / predicted), 1.5)
        for precision, profile, predicted, measured in compare()
    ]  # fmt: skip


def compare() -> list[tuple[str, str, float, float]]:
    """(precision, profile, predicted, measured) seconds of a training step on one GPU."""
    if not torch.cuda.is_available():
        return []
    with profile_of(torch.cuda.get_device_name(0)) as profile:
        return [
            (precision, Path(profile).stem,
             predict("resnet50", BATCH, "single", profile=profile, precision=precision).step_s,
             step_seconds(precision))
            for precision in PRECISIONS
        ]  # fmt: skip


@contextmanager
def profile_of(name: str) -> Iterator[str]:
    """The profile of a GPU that CUDA calls so; a measured one where none is known."""
    for profile, parts in NAMES.items():
        if profile in profiles.names() and any(part in name for part in parts):
            yield profile
            return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measured.toml")
        path.write_text(toml(measure_hardware(1)), encoding="utf-8")
        yield str(path)


def step_seconds(precision: str) -> float:
    """The median step of real training on GPU 0, between events on its stream."""
    spec = models.spec("resnet50")
    model = spec.build().cuda()
    optimizer = spec.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "amp")
    (images,), labels = spec.batch(BATCH)
    batch = images.pin_memory(), labels.pin_memory()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        optimizer.zero_grad()
        x, y = (part.cuda(non_blocking=True) for part in batch)
        with torch.autocast("cuda", torch.float16, enabled=precision == "amp"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 for a, b in zip(marks[WARM_UP:], marks[WARM_UP + 1 :])]
    return statistics.median(times)


def show() -> None:
    """Print predicted beside measured."""
    rows: list[Any] = compare()
    if not rows:
        print("No CUDA GPU here, so no step was measured.")
    for precision, profile, predicted, measured in rows:
        times = f"predicted {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms"
        error = f"{predicted / measured - 1:+.0%}"
        print(f"ResNet-50, batch {BATCH}, {precision}, {profile}: {times} ({error})")


if __name__ == "__main__":
    show()
