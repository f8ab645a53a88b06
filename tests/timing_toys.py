"""A profile in round numbers, and entries of the log in few words."""

from __future__ import annotations

from typing import Any

from labutils.timing.profiles import Bus, Gpu, Host, Link, Model, Profile
from labutils.trace import Span, Trace
from labutils.virtual.record import Collective, Copy, Entry, Kernel

US = 1000
"""Nanoseconds."""


def toy(
    *,
    python: float = 0.0,
    dispatch: float = 0.0,
    engine: float = 0.0,
    launch: float = 0.0,
    sync: float = 0.0,
    thread: float = 0.0,
    depth: int = 1_000_000,
    shared: int = 1,
    passes: float = 0.0,
) -> Profile:
    """One byte takes one nanosecond everywhere; host costs in microseconds, 0 if not given.

    Args:
        passes: of the memory by a byte that a collective sends; 0: it disturbs no kernel.
    """
    host = Host(
        python_seconds=python / 1e6, dispatch_seconds=dispatch / 1e6, engine_seconds=engine / 1e6,
        view_seconds=python / 1e6, tensor_seconds=0.0, collective_seconds=dispatch / 1e6,
        sync_seconds=sync / 1e6, thread_seconds=thread / 1e6, launch_seconds=launch / 1e6,
        queue_depth=depth,
    )  # fmt: skip
    model = Model(
        memory_efficiency=1.0, simt_efficiency=1.0, tensor_efficiency=1.0, conv_efficiency=1.0,
        attention_efficiency=1.0, tensor_conv_efficiency=1.0, gradient_efficiency=1.0,
         winograd_gain=1.0, tile_seconds=1e-12,
        layout_passes=0.0, pointwise_layout_share=0.0,
         kernel_floor=0.0, norm_read_passes=1.0, norm_read_passes_nhwc=1.0,
        norm_processor_bandwidth=1e18, tensors_per_launch=1000,
        collective_base=0.0, collective_processor_bandwidth=1e18, collective_memory_passes=passes,
    )  # fmt: skip
    gpu = Gpu("toy", 10**9, 10, 1e9, {"float32": 1e15})
    curve = tuple((2 * 10**n, 2 * 10**n * 1e-9) for n in range(10))
    link = Link("wire", 1e9, 1e-12, ranks=2, curve=curve)
    bus = Bus("bus", pinned=1e9, pageable=0.5e9, latency=0.0)
    return Profile("toy", gpu, 8, bus, link, host, model, bus_shared_by=shared)


def kernel(
    length: int, thread: str = "main", device: int = 0, stream: int = 0, phase: str = "forward"
) -> Entry:
    """A kernel of ``length`` nanoseconds."""
    work = Kernel(f"k{length}", "elementwise", "float32", 0, length, 0)
    return Entry("kernel", thread, device, stream, phase, work)


def copy(
    length: int,
    source: int,
    target: int,
    *,
    thread: str = "main",
    stream: int = 0,
    pinned: bool = True,
    blocking: bool = False,
    source_stream: int = 0,
) -> Entry:
    """A copy of ``length`` bytes, so many nanoseconds from pinned memory."""
    name = "h2d" if source < 0 else "d2h" if target < 0 else "p2p"
    work = Kernel(name, "copy", "float32", 0, length, length)
    device = source if target < 0 else target
    where = Copy(source, target, pinned, blocking, source_stream)
    return Entry("copy", thread, device, stream, "data", work, where)


def collective(
    length: int, devices: tuple[int, ...], thread: str = "main", device: int = 0, **more: Any
) -> Entry:
    """A broadcast to the other one of two devices, ``length`` nanoseconds."""
    work = Kernel("broadcast", "communication", "float32", 0, length, length)
    ref = Collective("broadcast", devices, **more)
    return Entry("collective", thread, device, 0, "forward", work, ref)


def note(
    what: str, ref: Any = None, thread: str = "main", device: int = 0, stream: int = 0
) -> Entry:
    """An entry that is no operation."""
    return Entry(what, thread, device, stream, "", None, ref)


def times(trace: Trace, device: str, lane: str = "compute") -> list[tuple[int, int]]:
    """(start, end) of the spans of one lane, in nanoseconds."""
    return [nanoseconds(s) for s in trace.spans if s.device == device and s.lane == lane]


def nanoseconds(span: Span) -> tuple[int, int]:
    return round(span.start * 1e9), round(span.end * 1e9)
