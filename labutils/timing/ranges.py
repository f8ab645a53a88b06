"""What is possible on any hardware: an entry of a profile outside has the wrong unit."""

from __future__ import annotations

from typing import Any

SECONDS = (1e-9, 1.0, "seconds")
RATE = (1e9, 1e15, "bytes per second")
LINK = (1e4, 1e13, "bytes per second")
"""NVLink 5 has 9e11 a direction, and the memory behind it 8e12 (NVIDIA's B200 data sheet)."""
SHARE = (1e-4, 1e2, "times, as a plain number")
"""Wide: what cannot exceed 1 is checked as such."""

RANGES: dict[str, tuple[float, float, str]] = {
    "memory_bytes": (2**28, 2**45, "bytes"),
    "multi_processor_count": (1, 1e5, "multiprocessors"),
    "memory_bandwidth": RATE,
    "peak": (1e8, 1e17, "FLOP per second"),
    "pinned": (1e6, 1e15, "bytes per second"),
    "pageable": (1e6, 1e15, "bytes per second"),
    "bandwidth": LINK,
    "pair": LINK,
    "by_ranks": LINK,
    "latency": (1e-9, 10.0, "seconds"),
    "ranks": (1, 2**20, "GPUs"),
    "gpus": (1, 2**16, "GPUs"),
    "bus_shared_by": (1, 2**16, "GPUs"),
    "queue_depth": (1, 1e6, "launches"),
    "tile_seconds": (1e-12, 1.0, "seconds"),
    "kernel_floor": SECONDS,
    "collective_base": SECONDS,
    "norm_processor_bandwidth": RATE,
    "collective_processor_bandwidth": (1e3, 1e15, "bytes per second"),
    "collective_memory_passes": (1e-9, 1e2, SHARE[2]),
    "tensors_per_launch": (1, 1e5, "tensors"),
}
"""Least and most, both possible, and the unit, of each entry but the host's seconds and the
model's shares; a CPU, a busy machine and a rehearsed network are within, GB/s or microseconds are
not."""


def check(key: str, value: Any, where: str) -> None:
    """Raise ``ValueError`` where entry ``key`` has a number, or a table of them, out of range."""
    if isinstance(value, dict):
        for name, number in value.items():
            _check(key, number, f"{where}.{name}")
    elif isinstance(value, (int, float)):
        _check(key, value, where)


def _check(key: str, value: float, where: str) -> None:
    low, high, unit = RANGES.get(key, SECONDS if key.endswith("_seconds") else SHARE)
    if not low <= value <= high:
        raise ValueError(
            f"{where} is in {unit}, {low:.9g} to {high:.9g}, so it cannot be {value:.9g}."
        )


__all__ = ["LINK", "RANGES", "check"]
