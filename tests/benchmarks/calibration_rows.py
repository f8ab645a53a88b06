"""The published measurements that the timing model is compared with, and how each is predicted.

``labutils.timing.published`` says which question to the model gives the number of a row of
``calibration.csv``.  Here is how that question is asked with other parameters of the model; rows
that no model of hardware can give are listed with the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from labutils.timing import cost, profiles, published
from labutils.timing.play import Prediction, exposed, play
from labutils.timing.predict import Question
from labutils.timing.profiles import Profile
from labutils.virtual.record import Copy, Entry

PACKAGED = published.TABLE
Parameters = Mapping[str, float]

JOINED = ("rn50-dgx2-",)
"""Rows of MXNet, in which batch norm, addition and ReLU are one kernel."""


def prediction(name: str, parameters: Parameters) -> Prediction:
    """The step of a row with these parameters of the model in place of those of the profile."""
    question, entries = _asked(name)
    hardware = with_parameters(question.hardware, parameters)
    ranks = question.gpus * question.nodes
    trace = play(question.recording, entries, hardware, ranks, question.gpus)
    rate = question.batch * ranks / trace.duration
    nothing: dict[str, int] = {}
    return Prediction(trace.duration, rate, 1.0, exposed(trace), nothing, True, trace)


@lru_cache(maxsize=64)
def _asked(name: str) -> tuple[Question, list[Entry]]:
    question = Question(**published.ASKED[name])
    entries = question.entries
    return question, _joined(entries) if name.startswith(JOINED) else entries


def _joined(entries: list[Entry]) -> list[Entry]:
    """A batch norm that adds and clips before it writes: of an addition the other term is left to
    be read, and of a ReLU nothing."""
    made = []
    for entry in entries:
        kernel = entry.kernel
        if kernel is not None and kernel.name in ("relu_", "threshold_backward"):
            continue
        if kernel is not None and kernel.name == "add" and entry.phase == "forward":
            entry = entry._replace(
                kernel=kernel._replace(bytes_read=kernel.bytes_read // 2, bytes_written=0)
            )
        made.append(entry)
    return made


def with_parameters(profile: Profile, parameters: Parameters) -> Profile:
    """``profile`` with other values in its [model] table."""
    return replace(profile, model=replace(profile.model, **parameters))


# ----------------------------------------------------------------------------------- the questions

LINE_RATE = {
    "busbw-a100-3nodes": 100.0,
    "busbw-v100-ib": 12.5,
    "busbw-v100-dgx1-4ib": 50.0,
}
"""GB/s on the wire of the InfiniBand rows; each is checked with the share that the others reach."""
BUS: dict[str, tuple[str, str | None, int, int]] = {
    "busbw-h200": ("H200-SXM", None, 8, 1),
    "busbw-h100-pcie2": ("H100-PCIe", None, 2, 1),
    "busbw-a100-host": ("A100-PCIe", None, 3, 1),
    "busbw-a100-3nodes": ("DGX-A100", "ib-4xHDR", 24, 3),
    "busbw-v100-ib": ("DGX-1-V100", "ib-100g", 32, 4),
    "busbw-v100-dgx1-4ib": ("DGX-1-V100", "ib-4x100g", 32, 4),
    "busbw-v100-tcp": ("DGX-1-V100", "eth-100g", 32, 4),
}
"""Profile, fabric, ranks, nodes."""
COPIES = {"h2d-pinned": True, "h2d-pageable": False}
"""Copies of 16 MB over PCIe 3.0, and whether host memory is pinned."""

GROUPS = (
    ("rn50-v100", "rn50-v100-"), ("rn101-v100", "rn101-v100-"), ("mxnet", "rn50-dgx2-"),
    ("txl", "txl-"),
)  # fmt: skip
"""Rows of one group measure the same run, so that they are left out together."""

OUT_OF_REACH = {
    "fig6": "depends on the batch and on the rate of that network, both unpublished",
    "fig8": "depends on the batch and on the rate of that network, both unpublished",
    "fig9": "batch is unpublished; from jobs on machines and networks that differed",
    "h100-rn50-128-bwd": "counts idle time: spans from the first to the last kernel of an operator,"
    " between which the profiled host was late; kernels alone are 46.0 in the same file",
    "nccl-lat": "three latencies of a formula, not a measurement; they are taken over as they are",
    "dp-gpu0-memory": "a user's own model; its batch and image size are not in the report",
    "dp-bert-v100": "'about twice' in a bug report, without batch, length or vocabulary",
    "nersc-workers": "speed of one program's data loading on one file system, not of a GPU",
}
"""Beginnings of row names, and why nothing is predicted."""


def read(path: Path) -> dict[str, float]:
    """The published values by row name."""
    return {point.name: point.value for point in published.points(path)}


def reason(name: str) -> str | None:
    """Why a row is out of reach, or None."""
    return next((why for start, why in OUT_OF_REACH.items() if name.startswith(start)), None)


def group(name: str) -> str:
    """The rows that are left out together with this one have the same group."""
    return next((label for label, start in GROUPS if name.startswith(start)), name)


def predicted(name: str, parameters: Parameters) -> float:
    """The model's number for a row."""
    if name in published.ASKED:
        return point(name).of(prediction(name, parameters))
    if name in COPIES:
        copy, nbytes = Copy(-1, 0, COPIES[name], True), 16_000_000
        return nbytes / cost.copy_seconds(nbytes, copy, profiles.load("T4")) / 1e9
    if name in BUS:
        return _bus_bandwidth(*BUS[name])
    if name.startswith("allreduce-a100-"):
        profile = profiles.load("DGX-A100")
        return 1e6 * cost.collective_seconds("all_reduce", curve_bytes(name), 8, profile)
    raise KeyError(f"calibration.csv has a row {name!r} that nothing here predicts.")


def point(name: str) -> published.Point:
    """The row of that name."""
    return next(p for p in published.points() if p.name == name)


def without_point(name: str) -> float:
    """A point of the measured curve from its neighbours alone, in microseconds."""
    profile, size = profiles.load("DGX-A100"), curve_bytes(name)
    curve = tuple(point for point in profile.link.curve if point[0] != size)
    known = replace(profile, link=replace(profile.link, curve=curve))
    return 1e6 * cost.collective_seconds("all_reduce", size, 8, known)


def is_input(name: str) -> bool:
    """Whether a profile holds the row's number itself, so that meeting it proves nothing."""
    return name in BUS or name in COPIES or name.startswith("allreduce-")


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
    """Whether the row depends on the parameters that are fitted, and takes part in the fit."""
    return name in published.ASKED and reason(name) is None


def _bus_bandwidth(name: str, fabric: str | None, ranks: int, nodes: int) -> float:
    profile, size = profiles.load(name, fabric), 16 << 30
    seconds = cost.collective_seconds("all_reduce", size, ranks, profile, nodes)
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9
