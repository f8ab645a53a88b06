"""What was measured of a machine, as a profile file and in words."""

from __future__ import annotations

import json
import statistics
from typing import Any

WAYS = ("pinned", "pageable")

Measured = dict[str, Any]
"""What ``measure.measure`` returns."""


def toml(measured: Measured) -> str:
    """The profile file of what was measured; ``profiles.load`` reads it."""
    typical = max if measured["kind"] == "cuda" else statistics.median  # CPUs: any size is alike
    best = {k: typical(rate for _, rate in rates) for k, rates in measured["matmul"].items()}
    conv = typical(rate for _, rate in measured["conv"]) / best["float32"]
    source = f"measured by labutils measure-hardware, {measured['date']}"
    peaks = ", ".join(f"{name} = {rate:.4g}" for name, rate in best.items())
    half = [name for name in best if name != "float32"]
    sizes = [f"# matmul {k}, [size, FLOP/s]: {_pairs(v)}" for k, v in measured["matmul"].items()]
    lines = [
        f"# {source}: {measured['name']}, {measured['ranks']} ranks",
        *sizes,
        f"# conv float32, [channels, FLOP/s]: {_pairs(measured['conv'])}",
        'profile = "this-machine"', "",
        "[system.this-machine]", f'gpu = "{measured["name"]}"', f"gpus = {measured['ranks']}", "",
        f'[gpu."{measured["name"]}"]', f'source = "{source}"',
        f"memory_bytes = {measured['memory']}",
        f"multi_processor_count = {measured['processors']}",
        f"memory_bandwidth = {measured['bandwidth']:.4g}",
        f"peak = {{ {peaks} }}", f"tensor = {json.dumps(half)}",
        'bus = "this-machine"', f'link = "{"this-ranks" if measured["all_reduce"] else "pcie3"}"',
        "", *_bus(measured), *_link(measured), *_model(measured, conv),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _pairs(pairs: list[list[float]]) -> str:
    return ", ".join(f"[{int(a)}, {b:.4g}]" for a, b in pairs)


def _bus(measured: Measured) -> list[str]:
    """The way to the device; a CPU is its own device, and copies nothing."""
    ways = measured["to_device"] or {"pinned": 1e15, "pageable": 1e15, "latency": 1e-9}
    return ["[bus.this-machine]", *(f"{key} = {value:.4g}" for key, value in ways.items()), ""]


def _link(measured: Measured) -> list[str]:
    """The curve as it is, from where it rises: every point above the shortest time."""
    curve = measured["all_reduce"]
    if not curve:
        return []
    ranks, (nbytes, seconds) = measured["ranks"], curve[-1]
    bandwidth = 2 * (ranks - 1) / ranks * nbytes / seconds
    return [
        "[link.this-ranks]", f"ranks = {ranks}", f"bandwidth = {bandwidth:.4g}",
        f"latency = {curve[0][1] / (2 * (ranks - 1)):.4g}",
        f"curve = [{_pairs(curve)}]", "",
    ]  # fmt: skip


def _model(measured: Measured, conv: float) -> list[str]:
    """The peaks are measured ones, so that nothing is lost of them.

    On a CPU an operation is over when the call returns: the host's part is in ``kernel_floor``,
    and there is nothing to launch.
    """
    lines = ["[model]", "memory_efficiency = 1.0", "simt_efficiency = 1.0",
             "tensor_efficiency = 1.0", f"conv_efficiency = {conv:.3g}",
             "tensor_conv_efficiency = 1.0", "gradient_efficiency = 1.0",
             "winograd_gain = 1.0"]  # fmt: skip
    if measured["kind"] == "cuda":
        return [*lines, f"kernel_floor = {measured['shortest']:.3g}"]
    shortest = measured["shortest"]
    names = ("python", "dispatch", "engine", "view", "tensor", "sync", "thread", "launch")
    return [
        *lines, f"kernel_floor = {shortest:.3g}", "tile_seconds = 1e-12", "tensors_per_launch = 1",
        "norm_read_passes = 1.0", "norm_read_passes_nhwc = 1.0",
        "norm_processor_bandwidth = 1e15", "collective_base = 1e-6",
        *_shared(measured), "", "[host]",
        *(f"{name}_seconds = 1e-9" for name in names), "collective_seconds = 1e-6",
    ]  # fmt: skip


def _shared(measured: Measured) -> list[str]:
    """What an all-reduce takes from the core that computes: its processor time; its memory traffic
    is part of that."""
    if not measured["all_reduce"]:
        return []
    ranks, (nbytes, _) = measured["ranks"], measured["all_reduce"][-1]
    full = 2 * (ranks - 1) / ranks * nbytes / max(measured["busy"], 1e-9)
    return [f"collective_processor_bandwidth = {full:.4g}", "collective_memory_passes = 1e-9"]


def report(measured: Measured) -> str:
    """The numbers in plain text."""
    lines = [f"{measured['name']}, {measured['ranks']} ranks"]
    for name, rates in measured["matmul"].items():
        lines += [f"matmul {name} {n:>5} {rate / 1e9:>10.1f} GFLOP/s" for n, rate in rates]
    lines += [f"conv float32 {n:>7} {rate / 1e9:>10.1f} GFLOP/s" for n, rate in measured["conv"]]
    lines.append(f"memory {measured['bandwidth'] / 1e9:>24.1f} GB/s")
    lines += [f"{k} {v / 1e9:.1f} GB/s" for k, v in measured["to_device"].items() if k in WAYS]
    lines += [f"all-reduce {int(n):>11,} B {s * 1e6:>8.0f} us" for n, s in measured["all_reduce"]]
    return "\n".join(lines)


__all__ = ["WAYS", "Measured", "report", "toml"]
