"""How long one kernel, copy or collective takes on a profile.

Kernels follow a roofline (Williams et al. 2009): the longer of arithmetic and memory traffic, plus
the shortest time that any kernel takes.  The arithmetic rate of matrix products depends on their
size (``products.py``).  Collectives follow the steps of ring and tree algorithms,
with the time of one step taken from a measured all-reduce curve.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache

from ..virtual.record import Copy, Kernel
from .contention import Load, beside, load
from .products import arithmetic_seconds, is_pointwise
from .profiles import ITEM_BYTES, Link, Profile, measured_link

MATRIX_KINDS = ("gemm", "conv", "attention")
HALF_OPS = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives of n-1 ring steps of bytes/n each; an all-reduce is two of them."""


# ----------------------------------------------------------------------------------------- kernels


def kernel_seconds(kernel: Kernel, profile: Profile) -> float:
    """Seconds that ``kernel`` occupies a GPU of ``profile``; 0 for a view.

    Where TF32 is allowed and not quicker, libraries take the ordinary cores.
    """
    if kernel.kind == "view":
        return 0.0
    launches = math.ceil(max(1, kernel.tensors) / profile.model.tensors_per_launch)
    memory = _memory_seconds(kernel, profile)
    dtype = precision(kernel, profile)
    seconds = max(_arithmetic_seconds(kernel, dtype, profile), memory)
    if dtype == "tfloat32":
        ordinary = max(_arithmetic_seconds(kernel, "float32", profile), memory)
        seconds = min(ordinary, seconds + _layout_seconds(kernel, memory, profile))
    return launches * profile.model.kernel_floor + seconds


def precision(kernel: Kernel, profile: Profile) -> str:
    """The type that the arithmetic of ``kernel`` runs in: float32 becomes tfloat32 where the GPU
    has it and the program allows it (PyTorch's default: in convolutions)."""
    if kernel.dtype == "float32" and kernel.kind in profile.tf32 and "tfloat32" in profile.gpu.peak:
        return "tfloat32"
    return kernel.dtype


def _layout_seconds(kernel: Kernel, memory: float, profile: Profile) -> float:
    """Changes of layout around a convolution on TF32 cores."""
    if kernel.kind != "conv":
        return 0.0
    share = profile.model.pointwise_layout_share if is_pointwise(kernel) else 1.0
    return share * profile.model.layout_passes * memory


def _memory_seconds(kernel: Kernel, profile: Profile) -> float:
    bandwidth = profile.gpu.memory_bandwidth * profile.model.memory_efficiency
    if kernel.kind == "norm" and "batch_norm" in kernel.name:
        return _batch_norm_seconds(kernel, bandwidth, profile)
    moved = kernel.bytes_read + kernel.bytes_written
    if kernel.name == "convolution_backward":  # both of its products read the output's gradient
        moved += math.prod(kernel.shapes[0]) * ITEM_BYTES.get(kernel.dtype, 4)
    return moved / bandwidth


def _batch_norm_seconds(kernel: Kernel, bandwidth: float, profile: Profile) -> float:
    """Batch norm reads its input for the statistics, and again, partly from the cache.

    Channels first, a thread block sums a channel, so that the multiprocessors that have one limit
    the bandwidth.  Half precision is taken to be channels last, as tensor cores want it.
    """
    model, processors = profile.model, profile.gpu.multi_processor_count
    passes = model.norm_read_passes_nhwc
    if ITEM_BYTES.get(kernel.dtype, 4) >= 4:
        passes = model.norm_read_passes
        shape = kernel.shapes[0] if kernel.shapes else ()
        busy = min(processors, shape[1]) if len(shape) > 1 else processors
        bandwidth = min(bandwidth, busy * model.norm_processor_bandwidth)
    return (passes * kernel.bytes_read + kernel.bytes_written) / bandwidth


def _arithmetic_seconds(kernel: Kernel, dtype: str, profile: Profile) -> float:
    peak = profile.gpu.peak
    if not kernel.flops:
        return 0.0
    if kernel.kind not in MATRIX_KINDS:
        return kernel.flops / peak.get("float32", max(peak.values()))
    return arithmetic_seconds(kernel, dtype, profile)


# ------------------------------------------------------------------------------------------- copies


def copy_seconds(nbytes: int, copy: Copy, profile: Profile) -> float:
    """Seconds to copy ``nbytes`` from ``copy.source`` to ``copy.target`` (-1: host memory)."""
    if -1 in (copy.source, copy.target):
        bus = profile.bus
        return bus.latency + nbytes / (bus.pinned if copy.pinned else bus.pageable)
    if copy.source == copy.target:
        bandwidth = profile.gpu.memory_bandwidth * profile.model.memory_efficiency
        return profile.model.kernel_floor + 2 * nbytes / bandwidth
    link = profile.link
    return link.latency + nbytes / (link.pair or link.bandwidth)


# -------------------------------------------------------------------------------------- collectives


def collective_seconds(
    op: str, nbytes: int, n_devices: int, profile: Profile, nodes: int = 1
) -> float:
    """Seconds of one collective over ``n_devices`` GPUs, spread evenly over ``nodes``.

    ``nbytes`` is the size S of the whole tensor: what every rank holds before an all-reduce,
    broadcast or reduce, after an all-gather, before a reduce-scatter.  Within a node: ring steps of
    S/n bytes, each as long as the measured curve says.  Over nodes: the faster of NCCL's ring and
    tree (NVIDIA/nccl src/graph/tuning.cc), limited by the slower of the node's links and fabric.

    Raises ``ValueError`` if ``nodes`` > 1 and the profile has no fabric.
    """
    base = profile.model.collective_base
    if n_devices <= 1:
        return profile.model.kernel_floor
    within = _within_node(op, nbytes, math.ceil(n_devices / nodes), profile)
    if nodes <= 1:
        return base + within
    if profile.fabric is None:
        raise ValueError(
            f"{profile.name} names no fabric between nodes: choose one, e.g. fabric='ib-100g'."
        )
    return base + max(within, _over_nodes(op, nbytes, n_devices, profile, profile.fabric, nodes))


def wire_bytes(op: str, nbytes: int, n: int) -> float:
    """Bytes that each of ``n`` GPUs sends in a ring."""
    share = (n - 1) / n
    return nbytes * share * (2 if op == "all_reduce" else 1)


def _within_node(op: str, nbytes: int, n: int, profile: Profile) -> float:
    if n == 1:
        return 0.0
    if op in ("all_reduce", "barrier"):
        return 2 * (n - 1) * step_seconds(nbytes / n, n, profile)
    if op in HALF_OPS:
        return (n - 1) * step_seconds(nbytes / n, n, profile)
    if op in ("gather", "scatter"):  # everything passes through the root's links
        return step_seconds(nbytes * (n - 1) / n, n, profile)
    return (n - 2) * profile.link.latency + step_seconds(nbytes, n, profile)  # a pipelined chain


def _over_nodes(op: str, nbytes: int, n: int, profile: Profile, fabric: Link, nodes: int) -> float:
    inner, outer = profile.link.latency, fabric.latency
    hops_ring = (n - nodes) * inner + (nodes - 1) * outer
    hops_tree = (n // nodes - 1) * inner + math.ceil(math.log2(nodes)) * outer
    seconds = nbytes / fabric.bandwidth
    ring, tree = hops_ring + (n - 1) / n * seconds, hops_tree + seconds
    if op in HALF_OPS:
        return ring
    if op in ("all_reduce", "barrier"):
        return 2 * min(ring, tree)
    return tree


def step_seconds(nbytes: float, ranks: int, profile: Profile) -> float:
    """Seconds of one ring step of ``nbytes`` per GPU, from a measured all-reduce curve.

    In units of a link's own latency and bandwidth the curve is taken to have the same shape on
    every link, so a link without a curve borrows the measured one's shape.
    """
    link = profile.link
    known = link if link.curve else measured_link()
    shape = _shape(known.curve, known.ranks, known.bandwidth * known.latency, known.latency,
                   profile.model.collective_base)  # fmt: skip
    return link.latency * _interpolate(shape, nbytes / link.among(ranks) / link.latency)


Shape = tuple[tuple[float, ...], tuple[float, ...]]


@lru_cache(maxsize=64)
def _shape(
    curve: tuple[tuple[int, float], ...], ranks: int, unit: float, latency: float, base: float
) -> Shape:
    """A measured curve as (ideal, measured) times of one step, in units of the link's latency.

    ``unit`` is the number of bytes that pass in one latency.
    """
    ideal = tuple(nbytes / ranks / unit for nbytes, _ in curve)
    taken = tuple((seconds - base) / (2 * (ranks - 1)) / latency for _, seconds in curve)
    return ideal, taken


def _interpolate(shape: Shape, x: float) -> float:
    """Straight lines on log-log paper; constant below the curve, proportional above it."""
    xs, ys = shape
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] * x / xs[-1]
    i = bisect_right(xs, x)
    share = math.log(x / xs[i - 1]) / math.log(xs[i] / xs[i - 1])
    return ys[i - 1] * math.exp(share * math.log(ys[i] / ys[i - 1]))


# ------------------------------------------------------------------------------ what the host pays


def issue_seconds(kernel: Kernel, python: bool, profile: Profile) -> tuple[float, float]:
    """Host seconds to issue ``kernel``: (holding the GIL, without it).

    ``python`` is false in the autograd engine's threads, and in functions of C++ that issue many
    operations: both need no GIL.
    """
    host = profile.host
    if kernel.kind == "view":
        return (host.view_seconds, 0.0) if python else (0.0, host.view_seconds)
    free = host.dispatch_seconds if python else host.engine_seconds
    if kernel.kind == "communication":
        free = host.collective_seconds
    if kernel.kind == "optimizer":
        free += kernel.tensors * host.tensor_seconds
    return (host.python_seconds if python else 0.0), free


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, the scheduler's unit."""
    return round(seconds * 1e9)


class Costs:
    """Costs on one profile in integer nanoseconds, kept per kernel (kernels are interned)."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._collectives: dict[tuple[str, int, int, int], tuple[int, Load]] = {}
        self._kernels: dict[int, tuple[Kernel, tuple[int, int, int, int, str]]] = {}
        self._smaller: dict[Load, tuple[Profile, dict[int, int]]] = {}

    def kernel(self, kernel: Kernel | None, python: bool) -> tuple[int, int, int, int, str]:
        """(host with GIL, host without, device, bytes, detail) of one kernel."""
        key = id(kernel) * 2 + python
        known = self._kernels.get(key)
        if known is None:
            assert kernel is not None, "operations carry a kernel"
            held, free = issue_seconds(kernel, python, self.profile)
            device = nanoseconds(kernel_seconds(kernel, self.profile))
            cost = nanoseconds(held), nanoseconds(free), device, kernel.bytes, describe(kernel)
            known = self._kernels[key] = kernel, cost
        return known[1]

    def beside(self, kernel: Kernel, taken: Load) -> int:
        """Time of a kernel on a GPU while a collective takes that much of it."""
        if taken not in self._smaller:
            self._smaller[taken] = beside(self.profile, taken), {}
        profile, known = self._smaller[taken]
        key = id(kernel)  # kept alive by self._kernels, which has every kernel
        if key not in known:
            known[key] = nanoseconds(kernel_seconds(kernel, profile))
        return known[key]

    def collective(self, op: str, nbytes: int, n_devices: int, nodes: int) -> tuple[int, Load]:
        """Time of one collective (see ``collective_seconds``), and what it takes from the GPU."""
        key = (op, nbytes, n_devices, nodes)
        if key not in self._collectives:
            seconds = collective_seconds(op, nbytes, n_devices, self.profile, nodes)
            taken = load(wire_bytes(op, nbytes, n_devices), seconds, self.profile)
            self._collectives[key] = nanoseconds(seconds), taken
        return self._collectives[key]


def describe(kernel: Kernel) -> str:
    """One short text for the hover: ``float32, 3.2 GFLOP``."""
    parts = [kernel.dtype] if kernel.dtype else []
    if kernel.flops >= 1e6:
        unit, scale = ("GFLOP", 1e9) if kernel.flops >= 1e8 else ("MFLOP", 1e6)
        parts.append(f"{kernel.flops / scale:.3g} {unit}")
    if kernel.tensors > 3:
        parts.append(f"{kernel.tensors} tensors")
    return ", ".join(parts)


__all__ = [
    "ITEM_BYTES", "Costs", "collective_seconds", "copy_seconds", "describe", "issue_seconds",
    "kernel_seconds", "nanoseconds", "precision", "step_seconds", "wire_bytes",
]  # fmt: skip
