"""Published measurements, and the questions to ``lab.predict`` that belong to them.

``rows("ddp_paper_fig9")`` gives the points of one publication.  A point has its value, its source,
and, where a step of training was measured, the arguments with which the model answers:

    for point in published.rows("pytorch_ddp_benchmark"):
        print(point.name, point.value, point.unit, point.of(lab.predict(**point.asked)))

The values are those of ``calibration.csv`` beside this file; nothing here is measured or simulated.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .play import Prediction
from .tables import unknown

TABLE = Path(__file__).with_name("calibration.csv")

PREFIXES: dict[str, str | tuple[str, ...]] = {
    "all_reduce_a100": "allreduce-a100-",
    "bus_bandwidth": "busbw-",
    "pytorch_ddp_benchmark": ("rn50-v100-", "rn101-v100-"),
    "resnet50_nvidia": ("rn50-dgx1-", "rn50-a100-", "rn50-dgx2-"),
    "bert_squad_nvidia": "bertl-squad-",
    "transformer_xl_nvidia": "txl-",
    "ddp_paper_fig6": "fig6-",
    "ddp_paper_fig8": "fig8-",
    "ddp_paper_fig9": "fig9-",
    "h100_phases": "h100-",
    "nccl_latency": "nccl-lat",
    "dataparallel_memory": "dp-",
    "loader_workers": "nersc-workers-",
    "host_to_device": "h2d-",
}
"""Name of a publication, and how the names of its rows begin."""

_RN50 = {"model": "resnet50", "batch": 32, "profile": "DGX-1-V100"}
_RN101 = {**_RN50, "model": "resnet101"}
_MXNET = {"model": "resnet50", "batch": 256, "profile": "DGX-2-V100", "precision": "fp16"}
_BERT = {"model": "bert_large", "seq": 384}
_TXL = {"model": "transformer_xl_base", "batch": 16, "profile": "DGX-1-V100", "precision": "amp"}
_PAPER = {**_RN50, "gpus": 8, "nodes": 4, "fabric": "ib-100g"}
_H100 = {"model": "resnet50", "batch": 128, "profile": "H100-SXM"}

ALONE: dict[str, Any] = {"strategy": "single"}
ASKED: dict[str, dict[str, Any]] = {
    "rn50-v100-noddp": {**_RN50, **ALONE},
    "rn50-v100-1": _RN50,
    "rn50-v100-2": {**_RN50, "gpus": 2},
    "rn101-v100-noddp": {**_RN101, **ALONE},
    "rn101-v100-1": _RN101,
    "rn101-v100-2": {**_RN101, "gpus": 2},
    "rn50-dgx1-fp32-1": {**_RN50, **ALONE, "batch": 112},
    "rn50-dgx1-amp-1": {**_RN50, **ALONE, "batch": 256, "precision": "amp"},
    "rn50-a100-tf32-1": {
        **_RN50, **ALONE, "batch": 256, "profile": "DGX-A100", "precision": "tf32",
    },
    "rn50-a100-amp-1": {
        **_RN50, **ALONE, "batch": 256, "profile": "DGX-A100", "precision": "amp",
    },
    "rn50-dgx2-1": {**_MXNET, **ALONE},
    "rn50-dgx2-2": {**_MXNET, "gpus": 2},
    "bertl-squad-v100-fp32-1": {**_BERT, **ALONE, "batch": 8, "profile": "DGX-1-V100"},
    "bertl-squad-v100-fp16-1": {
        **_BERT, **ALONE, "batch": 16, "profile": "DGX-1-V100", "precision": "fp16",
    },
    "bertl-squad-a100-tf32-1": {
        **_BERT, **ALONE, "batch": 32, "profile": "DGX-A100", "precision": "tf32",
    },
    "bertl-squad-a100-fp16-1": {
        **_BERT, **ALONE, "batch": 32, "profile": "DGX-A100", "precision": "fp16",
    },
    "txl-dgx1-1": {**_TXL, **ALONE},
    "txl-dgx1-2": {**_TXL, "gpus": 2},
    "fig6-rn50-nccl-fwd": _PAPER,
    "fig6-rn50-nccl-bwd": _PAPER,
    "fig6-rn50-nccl-comm": _PAPER,
    "fig6-rn50-nccl-opt": _PAPER,
    "fig8-rn50-nccl-32-25MB": {**_PAPER, "bucket_cap_mb": 25},
    "fig9-rn50-nccl-1": {**_PAPER, **ALONE, "gpus": 1, "nodes": 1},
    "fig9-rn50-nccl-32": _PAPER,
    "h100-rn50-128-fwd": {**_H100, **ALONE},
    "h100-rn50-128-bwd": {**_H100, **ALONE},
}  # fmt: skip
"""Arguments of ``lab.predict`` by row."""

ASSUMED = {
    "fig": "batch 32 per GPU (the paper has none); 4 servers of 8 V100, 100 Gbit/s InfiniBand each",
    "h100-": "H100-SXM (the trace names only an H100), TF32 in convolutions as PyTorch has it",
}
"""What a source does not say and the question takes for granted, by the beginning of row names."""


@dataclass(frozen=True)
class Point:
    """One published number."""

    name: str
    """The row of ``calibration.csv``."""
    what: str
    value: float
    unit: str
    hardware: str
    setting: str
    source: str
    asked: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``lab.predict`` for the same step; empty where no step was measured."""
    assumed: str = ""
    """What the source does not say, and ``asked`` takes for granted."""

    def of(self, prediction: Prediction) -> float:
        """This quantity of a prediction, in ``unit``."""
        if not self.asked:
            raise ValueError(f"{self.name} is no step of training, so nothing predicts it.")
        return _quantity(self.name, self.what)(prediction)


def names() -> list[str]:
    """The publications that :func:`rows` knows."""
    return list(PREFIXES)


def rows(publication: str) -> list[Point]:
    """The points of one publication, in the order of the table.

    Raises:
        ValueError: an unknown name; the nearest are offered.
    """
    if publication not in PREFIXES:
        raise ValueError(unknown("publication", publication, names()))
    return [p for p in points() if p.name.startswith(PREFIXES[publication])]


@lru_cache(maxsize=2)
def points(path: Path = TABLE) -> tuple[Point, ...]:
    """Every row of the table."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(_point(row) for row in csv.DictReader(file))


def _point(row: Mapping[str, str]) -> Point:
    name = row["id"]
    return Point(
        name, row["what"], float(row["value"]), row["unit"], row["hardware"], row["setting"],
        row["source"], dict(ASKED.get(name, {})),
        next((text for start, text in ASSUMED.items() if name.startswith(start)), ""),
    )  # fmt: skip


# ----------------------------------------------------------------- a prediction in a row's own unit

TXL_TOKENS = 192
"""Tokens of one sample of Transformer-XL."""
PHASES = {"fwd": "forward", "bwd": "backward", "comm": "communication", "opt": "optimizer"}


def _quantity(name: str, what: str) -> Callable[[Prediction], float]:
    phase = PHASES.get(name.rsplit("-", 1)[1], "")
    if what == "normalised latency":
        return lambda p: busy(p, phase) / sum(busy(p, kind) for kind in PHASES.values())
    if phase:
        return lambda p: 1e3 * busy(p, phase)
    if what == "throughput":
        tokens = TXL_TOKENS if name.startswith("txl-") else 1
        return lambda p: p.samples_per_s * tokens
    return lambda p: p.step_s


def busy(prediction: Prediction, kind: str) -> float:
    """Seconds of kernels (or collectives) of one kind on GPU 0, summed up."""
    lanes = ("compute", "communication")
    spans = [s for s in prediction.trace.spans if s.kind == kind and s.lane in lanes]
    return sum(s.end - s.start for s in spans)


__all__ = ["Point", "busy", "names", "points", "rows"]
