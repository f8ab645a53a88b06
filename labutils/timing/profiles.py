"""Hardware profiles: what a GPU, its links and its host can do, every number with its source.

A profile is named after a system (``DGX-A100``) or a single kind of GPU (``V100-SXM2``), or is the
path of a TOML file with the same tables as ``profiles.toml``: those of the file are added to those
that come with the package, and the file's own ``profile = "name"`` says which one it means.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Tables = dict[str, Any]
T = TypeVar("T")
BUILT_IN = Path(__file__).with_name("profiles.toml")
GPUS_PER_NODE = 8
"""GPUs in one node of a profile that names a kind of GPU and no system."""


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
    attention_efficiency: float
    tile_rows: int
    tile_columns: int
    simt_depth: float
    tensor_depth: float
    kernel_floor: float
    norm_read_passes: float
    tensors_per_launch: int
    collective_base: float
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
    tables, wanted = _built_in(), os.fspath(name)
    if wanted.endswith(".toml"):
        tables, wanted = _with_file(tables, Path(wanted))
    return _build(tables, wanted, fabric)


@lru_cache(maxsize=1)
def _built_in() -> Tables:
    return tomllib.loads(BUILT_IN.read_text(encoding="utf-8"))


def _with_file(tables: Tables, path: Path) -> tuple[Tables, str]:
    """The built-in tables with a user's own on top, and the profile that the file names."""
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"There is no profile file {str(path)!r}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"The profile file {path.name} is not readable TOML: {error}.") from None
    defined = [*_table(own, "system"), *_table(own, "gpu")]
    wanted = own.get("profile", defined[0] if defined else None)
    if not isinstance(wanted, str):
        raise ValueError(f"{path.name} defines no [gpu.NAME] or [system.NAME] table.")
    merged = {
        key: {**_table(tables, key), **_table(own, key)} for key in {*tables, *own} - {"profile"}
    }
    return merged, wanted


def _table(tables: Tables, key: str) -> Tables:
    value = tables.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"In a profile file [{key}] must be a table.")
    return value


def _build(tables: Tables, name: str, fabric: str | None) -> Profile:
    if name in tables["system"]:
        system = dict(tables["system"][name])
    elif name in tables["gpu"]:
        system = {"gpu": name, "gpus": GPUS_PER_NODE}
    else:
        raise ValueError(_unknown("profile", name, [*tables["system"], *tables["gpu"]]))
    gpu = _part(Gpu, tables, "gpu", _need(system, "gpu", f"system.{name}"))
    fabric = fabric or system.get("fabric")
    return Profile(
        name=name,
        gpu=gpu,
        gpus=int(_number(system.get("gpus"), f"system.{name}", "gpus")),
        bus=_part(Bus, tables, "bus", system.get("bus", gpu.bus)),
        link=_part(Link, tables, "link", system.get("link", gpu.link)),
        host=_fill(Host, tables["host"], "host"),
        model=_fill(Model, tables["model"], "model"),
        bus_shared_by=int(_number(system.get("bus_shared_by", 1), name, "bus_shared_by")),
        fabric=_part(Link, tables, "fabric", fabric) if fabric else None,
        source=system.get("source", gpu.source),
    )


def _part(kind: type[T], tables: Tables, table: str, name: str) -> T:
    """The named entry of one table as a dataclass; ``like`` inherits from another entry."""
    if name not in tables[table]:
        raise ValueError(_unknown(table, name, list(tables[table])))
    values, seen = dict(tables[table][name]), {name}
    while "like" in values:
        parent = values.pop("like")
        if parent not in tables[table] or parent in seen:
            raise ValueError(f"{table}.{name} is like {parent!r}, which is not another {table}.")
        seen.add(parent)
        values = {**tables[table][parent], **values}
    return _fill(kind, {"name": name, **values}, f"{table}.{name}")


def _fill(kind: type[T], values: Tables, where: str) -> T:
    """A dataclass from a table, each number checked."""
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    extra = [key for key in values if key not in known]
    if extra:
        raise ValueError(_unknown(f"entry of [{where}]", extra[0], list(known)))
    filled: dict[str, Any] = {}
    for key, spec in known.items():
        optional = spec.default is not dataclasses.MISSING or (
            spec.default_factory is not dataclasses.MISSING
        )
        if key in values or not optional:
            filled[key] = _value(str(spec.type), _need(values, key, where), where, key)
    return kind(**filled)


def _value(kind: str, value: Any, where: str, key: str) -> Any:
    if kind == "str":
        return value
    if kind in ("int", "float"):
        number = _number(value, where, key)
        return int(number) if kind == "int" else number
    if kind == "dict[str, float]":
        return {name: _number(v, where, f"{key}.{name}") for name, v in value.items()}
    if kind == "dict[int, float]":
        return {int(n): _number(v, where, f"{key}.{n}") for n, v in value.items()}
    if kind == "tuple[str, ...]":
        return tuple(value)
    points = tuple((int(b), _number(s, where, key)) for b, s in value)
    if any(b >= c for (b, _), (c, _) in itertools.pairwise(points)):
        raise ValueError(f"the points of {where}.{key} must be in ascending order of bytes.")
    return points


def _need(values: Tables, key: str, where: str) -> Any:
    if key not in values:
        raise ValueError(f"[{where}] has no {key!r}.")
    return values[key]


def _number(value: Any, where: str, key: str) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value < 1e18:
        raise ValueError(f"{where}.{key} must be a positive number, not {value!r}.")
    return float(value)


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(known)}."
    return f"Unknown {what} {name!r}. {hint}"


__all__ = [
    "Bus", "Gpu", "Host", "Link", "Model", "Profile", "fabrics", "load", "measured_link", "names",
]  # fmt: skip
