"""The published measurements that the timing model is compared with, and how each is predicted.

A row of ``calibration.csv`` says what was measured on what.  Here is which question to the model
gives that number; rows that no model of hardware can give are listed with the reason.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from labutils.timing import cost, ddp, library, profiles
from labutils.timing.play import play, steps
from labutils.timing.profiles import Profile
from labutils.timing.recording import Recording, Setting
from labutils.virtual.record import Entry

PACKAGED = Path(profiles.__file__).with_name("calibration.csv")
Parameters = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A training step that somebody measured."""

    model: str
    batch: int
    profile: str
    precision: str = "fp32"
    ranks: int = 0
    """0: no DistributedDataParallel."""
    seq: int | None = None
    joined: bool = False
    """Batch norm, addition and ReLU are one kernel (MXNet, NHWC)."""

    def trace(self, parameters: Parameters) -> Any:
        """One step with these parameters of the model in place of those of the profile."""
        profile = with_parameters(profiles.load(self.profile), parameters)
        if self.precision == "tf32":
            profile = replace(profile, tf32=frozenset({"conv", "gemm", "attention"}))
        recording = self.recording()
        groups = ddp.buckets(recording.gradients, 25, 1) if self.ranks else []
        ranks = max(1, self.ranks)
        return play(recording, steps(recording, 1, groups), profile, ranks, ranks)

    def recording(self) -> Recording:
        """The recorded step (kept)."""
        source = library.source(self.model, None, F.cross_entropy, None)
        setting = Setting(
            strategy="ddp" if self.ranks else "single", batch=self.batch, seq=self.seq,
            precision="fp32" if self.precision == "tf32" else self.precision,
        )  # fmt: skip
        recording = library.recording(source, setting)
        if self.joined:
            recording = replace(recording, last=[e for e in recording.last if not _is_relu(e)])
        return recording

    def seconds(self, parameters: Parameters) -> float:
        """Seconds of a step."""
        return float(self.trace(parameters).duration)

    def rate(self, per_sample: int, parameters: Parameters) -> float:
        """Samples (or tokens) per second of all GPUs."""
        return self.batch * per_sample * max(1, self.ranks) / self.seconds(parameters)

    def busy(self, kind: str, parameters: Parameters) -> float:
        """Milliseconds of kernels of one phase."""
        spans = [s for s in self.trace(parameters).spans if s.lane == "compute" and s.kind == kind]
        return 1e3 * sum(s.end - s.start for s in spans)


def _is_relu(entry: Entry) -> bool:
    return entry.kernel is not None and entry.kernel.name in ("relu_", "threshold_backward")


def with_parameters(profile: Profile, parameters: Parameters) -> Profile:
    """``profile`` with other values in its [model] table."""
    return replace(profile, model=replace(profile.model, **parameters))


# ----------------------------------------------------------------------------------- the questions

_RN50_32 = partial(Run, "resnet50", 32, "DGX-1-V100")
_RN101_32 = partial(Run, "resnet101", 32, "DGX-1-V100")
_MXNET = partial(Run, "resnet50", 256, "DGX-2-V100", "fp16", joined=True)
_TXL = partial(Run, "transformer_xl_base", 16, "DGX-1-V100", "amp")

STEPS: dict[str, Run] = {
    "rn50-v100-noddp": _RN50_32(), "rn50-v100-1": _RN50_32(ranks=1),
    "rn50-v100-2": _RN50_32(ranks=2),
    "rn101-v100-noddp": _RN101_32(), "rn101-v100-1": _RN101_32(ranks=1),
    "rn101-v100-2": _RN101_32(ranks=2),
}  # fmt: skip
RATES: dict[str, tuple[Run, int]] = {
    "rn50-dgx1-fp32-1": (Run("resnet50", 112, "DGX-1-V100"), 1),
    "rn50-dgx1-amp-1": (Run("resnet50", 256, "DGX-1-V100", "amp"), 1),
    "rn50-a100-tf32-1": (Run("resnet50", 256, "DGX-A100", "tf32"), 1),
    "rn50-a100-amp-1": (Run("resnet50", 256, "DGX-A100", "amp"), 1),
    "rn50-dgx2-1": (_MXNET(), 1),
    "rn50-dgx2-2": (_MXNET(ranks=2), 1),
    "bertl-squad-v100-fp32-1": (Run("bert_large", 8, "DGX-1-V100", seq=384), 1),
    "bertl-squad-v100-fp16-1": (Run("bert_large", 16, "DGX-1-V100", "fp16", seq=384), 1),
    "bertl-squad-a100-tf32-1": (Run("bert_large", 32, "DGX-A100", "tf32", seq=384), 1),
    "bertl-squad-a100-fp16-1": (Run("bert_large", 32, "DGX-A100", "fp16", seq=384), 1),
    "txl-dgx1-1": (_TXL(), 192),
    "txl-dgx1-2": (_TXL(ranks=2), 192),
}
PHASES: dict[str, tuple[Run, str]] = {
    "h100-rn50-128-fwd": (Run("resnet50", 128, "H100-SXM"), "forward"),
    "h100-rn50-128-bwd": (Run("resnet50", 128, "H100-SXM"), "backward"),
}
LINE_RATE = {
    "busbw-a100-3nodes": 100.0,
    "busbw-v100-ib": 12.5,
    "busbw-v100-dgx1-4ib": 50.0,
}
"""GB/s on the wire of the InfiniBand rows; each is checked with the share that the others reach."""
BUS: dict[str, tuple[str, str | None, int, int]] = {
    "busbw-h200": ("H200-SXM", None, 8, 1),
    "busbw-a100-3nodes": ("DGX-A100", "ib-4xHDR", 24, 3),
    "busbw-v100-ib": ("DGX-1-V100", "ib-100g", 32, 4),
    "busbw-v100-dgx1-4ib": ("DGX-1-V100", "ib-4x100g", 32, 4),
    "busbw-v100-tcp": ("DGX-1-V100", "eth-100g", 32, 4),
}
"""Profile, fabric, ranks, nodes."""

GROUPS = (
    ("rn50-v100", "rn50-v100-"), ("rn101-v100", "rn101-v100-"), ("mxnet", "rn50-dgx2-"),
    ("txl", "txl-"),
)  # fmt: skip
"""Rows of one group measure the same run, so that they are left out together."""

OUT_OF_REACH = {
    "fig6": "batch, network of that cluster and what 'communication' covers are unpublished",
    "fig8": "batch is unpublished; 0.121 s and Fig. 9's 0.255 s for 32 GPUs differ twofold",
    "fig9": "batch is unpublished, and the cluster was shared with other jobs",
    "h100-": "which H100 and whether TF32 are unpublished; sums of a profiler's times",
    "nccl-lat": "three latencies of a formula, not a measurement; they are taken over as they are",
    "dp-gpu0-memory": "a user's own model; its batch and image size are not in the report",
    "dp-bert-v100": "'about twice' in a bug report, without batch, length or vocabulary",
    "nersc-workers": "speed of one program's data loading on one file system, not of a GPU",
    "h2d-": "the only source of the pcie3 bus, which therefore has just these values",
    "busbw-h100-pcie2": "no profile has an H100 PCIe pair with an NVLink bridge",
    "busbw-a100-host": "the only source of the pcie4 link, which therefore has just this value",
}
"""Beginnings of row names, and why nothing is predicted."""


def read(path: Path) -> dict[str, float]:
    """The published values by row name."""
    with path.open(newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["value"]) for row in csv.DictReader(file)}


def reason(name: str) -> str | None:
    """Why a row is out of reach, or None."""
    return next((why for start, why in OUT_OF_REACH.items() if name.startswith(start)), None)


def group(name: str) -> str:
    """The rows that are left out together with this one have the same group."""
    return next((label for label, start in GROUPS if name.startswith(start)), name)


def predicted(name: str, parameters: Parameters) -> float:
    """The model's number for a row."""
    if name in STEPS:
        return STEPS[name].seconds(parameters)
    if name in RATES:
        run, per_sample = RATES[name]
        return run.rate(per_sample, parameters)
    if name in PHASES:
        run, kind = PHASES[name]
        return run.busy(kind, parameters)
    if name in BUS:
        return _bus_bandwidth(*BUS[name])
    if name.startswith("allreduce-a100-"):
        profile = profiles.load("DGX-A100")
        return 1e6 * cost.collective_seconds("all_reduce", curve_bytes(name), 8, profile)
    raise KeyError(f"calibration.csv has a row {name!r} that nothing here predicts.")


def without_point(name: str) -> float:
    """A point of the measured curve from its neighbours alone, in microseconds."""
    profile, size = profiles.load("DGX-A100"), curve_bytes(name)
    curve = tuple(point for point in profile.link.curve if point[0] != size)
    known = replace(profile, link=replace(profile.link, curve=curve))
    return 1e6 * cost.collective_seconds("all_reduce", size, 8, known)


def is_input(name: str) -> bool:
    """Whether a profile holds the row's number itself, so that meeting it proves nothing."""
    return name in BUS or name.startswith("allreduce-")


def from_others(name: str, published: Mapping[str, float]) -> float | None:
    """An input row from the rest alone: a point of the curve from its neighbours, a fabric from
    its line rate and the share of it that the others reach, NVLink 4 from NCCL's rate per link."""
    if name.startswith("allreduce-"):
        return without_point(name)
    if name in LINE_RATE:
        shares = [published[other] / rate for other, rate in LINE_RATE.items() if other != name]
        return LINE_RATE[name] * statistics.mean(shares)
    return 18 * 20.6 if name == "busbw-h200" else None


def curve_bytes(name: str) -> int:
    """Bytes of a row ``allreduce-a100-32K``."""
    size = name.rsplit("-", 1)[1]
    return int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]


def fitted(name: str) -> bool:
    """Whether the row depends on the parameters that are fitted."""
    return name in STEPS or name in RATES


def _bus_bandwidth(name: str, fabric: str | None, ranks: int, nodes: int) -> float:
    profile, size = profiles.load(name, fabric), 16 << 30
    seconds = cost.collective_seconds("all_reduce", size, ranks, profile, nodes)
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9
