"""Hardware profiles: what a GPU, its links and its host can do, every number with its source.

A profile is named after a system (``DGX-A100``) or a single kind of GPU (``V100-SXM2``), or is the
path of a TOML file with the same tables as ``profiles.toml``: those of the file are added to those
that come with the package, and the file's own ``profile = "name"`` says which one it means.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from . import ranges
from .tables import Tables, fill, named, need, read, table, text, unknown, whole

BUILT_IN = Path(__file__).with_name("profiles.toml")
GPUS_PER_NODE = 8
"""GPUs in one node of a profile that names a kind of GPU and no system."""

ITEM_BYTES = {"float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}
"""Element types that a GPU may have a peak for, with the bytes of an element."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.  ``peak`` maps an element type to dense FLOP/s."""

    name: str
    memory_bytes: int
    multi_processor_count: int
    memory_bandwidth: float
    """Bytes per second to its own memory."""
    peak: dict[str, float]
    tensor: tuple[str, ...] = ()
    """Element types that run on tensor cores."""
    bus: str = "pcie3"
    link: str = "pcie3"
    source: str = ""


@dataclass(frozen=True)
class Bus:
    """The way between host memory and one GPU; bytes per second and direction."""

    name: str
    pinned: float
    pageable: float
    latency: float
    source: str = ""


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of a node, or (``by_ranks`` and ``pair`` unused) the nodes."""

    name: str
    bandwidth: float
    """Bytes per second that every GPU can send in a collective over the whole node."""
    latency: float
    """Seconds per step of a collective."""
    pair: float = 0.0
    """Bytes per second of one copy between two GPUs; 0: the same as ``bandwidth``."""
    by_ranks: dict[int, float] = field(default_factory=dict)
    """Meshes: the bandwidth when only so many GPUs take part (they share fewer links)."""
    ranks: int = 0
    curve: tuple[tuple[int, float], ...] = ()
    """Measured all-reduce over ``ranks`` GPUs: (bytes, seconds), ascending."""
    source: str = ""

    def among(self, ranks: int) -> float:
        """Bandwidth of a collective among ``ranks`` GPUs of the node."""
        known = [n for n in self.by_ranks if n <= ranks]
        return self.by_ranks[max(known)] if known else self.bandwidth


@dataclass(frozen=True)
class Host:
    """What the host program pays, in seconds; see ``profiles.toml`` for each meaning."""

    python_seconds: float
    dispatch_seconds: float
    engine_seconds: float
    view_seconds: float
    tensor_seconds: float
    collective_seconds: float
    sync_seconds: float
    thread_seconds: float
    launch_seconds: float
    queue_depth: int
    source: str = ""


@dataclass(frozen=True)
class Model:
    """How library kernels use a GPU; see ``profiles.toml`` for each meaning."""

    memory_efficiency: float
    simt_efficiency: float
    tensor_efficiency: float
    conv_efficiency: float
    tensor_conv_efficiency: float
    gradient_efficiency: float
    attention_efficiency: float
    winograd_gain: float
    tile_seconds: float
    layout_passes: float
    pointwise_layout_share: float
    kernel_floor: float
    norm_read_passes: float
    norm_read_passes_nhwc: float
    norm_processor_bandwidth: float
    tensors_per_launch: int
    collective_base: float
    collective_processor_bandwidth: float
    collective_memory_passes: float
    source: str = ""


@dataclass(frozen=True)
class Profile:
    """One node's hardware, and what connects it to others.

    ``dataclasses.replace`` makes variants: another ``fabric``, or
    ``tf32=frozenset({"conv", "gemm"})`` for a program that allows TF32 in matrix products too
    (PyTorch's default allows it in convolutions only).
    """

    name: str
    gpu: Gpu
    gpus: int
    bus: Bus
    link: Link
    host: Host
    model: Model
    bus_shared_by: int = 1
    """GPUs that share one way to host memory (a PCIe switch)."""
    fabric: Link | None = None
    tf32: frozenset[str] = frozenset({"conv"})
    source: str = ""

    @property
    def link_is_bus(self) -> bool:
        """The GPUs reach each other only over the bus that leads to the host."""
        return self.link.name == self.bus.name


@lru_cache(maxsize=1)
def measured_link() -> Link:
    """The link whose measured curve lends its shape to links without one of their own."""
    return _part(Link, _built_in(), "link", "nvlink3-switch")


def names() -> list[str]:
    """Every profile that ``load`` knows: systems, then kinds of GPU."""
    tables = _built_in()
    return [*tables["system"], *tables["gpu"]]


def fabrics() -> list[str]:
    """Every fabric that ``load`` knows."""
    return list(_built_in()["fabric"])


def load(name: str | os.PathLike[str], fabric: str | None = None) -> Profile:
    """The profile of that name, or of that TOML file, on that ``fabric``.

    Raises ``ValueError`` for an unknown name (with the nearest known ones), and for a file with a
    missing, unknown or impossible entry.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise ValueError(f"profile must be a name or the path of a TOML file, but is {name!r}.")
    wanted = os.fspath(name)
    if not wanted.endswith(".toml"):
        return _build(_built_in(), wanted, fabric)
    own = read(Path(wanted))
    tables = _built_in()
    for key in own:
        if key not in (*tables, "profile"):
            raise ValueError(unknown(f"table of {Path(wanted).name}", key, [*tables, "profile"]))
    merged = {kind: {**known, **table(own.get(kind, {}), kind)} for kind, known in tables.items()}
    defined = [*own.get("system", {}), *own.get("gpu", {})]
    if not defined:
        raise ValueError(f"{Path(wanted).name} defines no [gpu.NAME] or [system.NAME] table.")
    return _build(merged, text(own.get("profile", defined[0]), "profile"), fabric)


@lru_cache(maxsize=1)
def _built_in() -> Tables:
    return read(BUILT_IN)


def _build(tables: Tables, name: str, fabric: str | None) -> Profile:
    if name in tables["system"]:
        system = named(tables, "system", name)
    elif name in tables["gpu"]:
        system = {"gpu": name, "gpus": GPUS_PER_NODE}
    else:
        raise ValueError(unknown("profile", name, [*tables["system"], *tables["gpu"]]))
    where = f"system.{name}"
    gpu = _part(Gpu, tables, "gpu", need(system, "gpu", where))
    _check_types(gpu)
    fabric = fabric or system.get("fabric")
    model = fill(Model, tables["model"], "model")
    link = _part(Link, tables, "link", system.get("link", gpu.link))
    _check(model, link)
    return Profile(
        name=name,
        gpu=gpu,
        gpus=_count(need(system, "gpus", where), "gpus", where),
        bus=_part(Bus, tables, "bus", system.get("bus", gpu.bus)),
        link=link,
        host=fill(Host, tables["host"], "host"),
        model=model,
        bus_shared_by=_count(system.get("bus_shared_by", 1), "bus_shared_by", where),
        fabric=_part(Link, tables, "fabric", fabric) if fabric else None,
        source=text(system.get("source", gpu.source), f"{where}.source"),
    )


def _count(value: Any, key: str, where: str) -> int:
    """A number of GPUs of a system."""
    number = whole(value, f"{where}.{key}")
    ranges.check(key, number, f"{where}.{key}")
    return number


def _check_types(gpu: Gpu) -> None:
    """Element types that there are, with peaks for float32 and for all on tensor cores."""
    where = f"gpu.{gpu.name}"
    for name in (*gpu.peak, *gpu.tensor):
        if name not in ITEM_BYTES:
            raise ValueError(unknown(f"element type in [{where}]", name, list(ITEM_BYTES)))
    if "float32" not in gpu.peak:
        raise ValueError(f"{where}.peak needs a number for 'float32'.")
    for name in gpu.tensor:
        if name not in gpu.peak:
            raise ValueError(f"{where}.tensor has {name!r}, but {where}.peak no number for it.")


SHARES = (
    "memory_efficiency", "simt_efficiency", "tensor_efficiency", "attention_efficiency",
    "pointwise_layout_share",
)  # fmt: skip
"""Entries of [model] that cannot exceed 1."""


def _check(model: Model, link: Link) -> None:
    """Numbers that are possible one by one, but not together."""
    for name in SHARES:
        if getattr(model, name) > 1:
            raise ValueError(f"model.{name} is a share, at most 1, but is {getattr(model, name)}.")
    for nbytes, seconds in link.curve:
        if seconds <= model.collective_base:
            raise ValueError(
                f"link.{link.name}.curve has {seconds} s for {nbytes} bytes, but launching a "
                f"collective alone takes {model.collective_base} s (model.collective_base)."
            )


Part = TypeVar("Part", Gpu, Bus, Link)


def _part(kind: type[Part], tables: Tables, group: str, name: str) -> Part:
    """The named entry of one group of tables."""
    part = fill(kind, named(tables, group, name), f"{group}.{name}")
    if isinstance(part, Link) and part.curve and part.ranks < 2:
        raise ValueError(f"{group}.{name} has a curve, so it needs 'ranks', 2 or more.")
    if isinstance(part, Link):
        _check_rates(part, f"{group}.{name}.curve")
    return part


def _check_rates(link: Link, where: str) -> None:
    """No GPU sends and receives faster than any link can: 2 (n - 1) / n bytes for each reduced."""
    for nbytes, seconds in link.curve:
        rate = 2 * (link.ranks - 1) / link.ranks * nbytes / seconds
        if rate > ranges.LINK[1]:
            raise ValueError(
                f"{where} has {seconds:g} s for {nbytes} bytes: each GPU would send {rate:.3g} "
                f"bytes per second, more than the {ranges.LINK[1]:g} that a link may have."
            )


__all__ = [
    "ITEM_BYTES", "Bus", "Gpu", "Host", "Link", "Model", "Profile", "fabrics", "load",
    "measured_link", "names",
]  # fmt: skip
