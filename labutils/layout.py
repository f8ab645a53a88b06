"""Where things go in a figure of a trace: plain functions from spans to rectangles.

One row per device: its memory strip, then its lanes.  Spans that overlap in one lane share its
height.  Bars that would be narrower than a pixel are added up per pixel, and the sum becomes the
strength of the colour, so that a lane that is busy a tenth of the time does not look full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from labutils.trace import Span, Trace

MAX_LEVELS = 4
"""Spans nested deeper than this are left out of the picture."""

MAX_HOST_LANES = 17
"""Room for the main thread and, of 8 GPUs, their workers and autograd's threads."""


class Band(NamedTuple):
    """One horizontal strip: ``lane`` is "" for memory; ``top`` and ``height`` in inches."""

    device: str
    lane: str
    top: float
    height: float
    levels: int = 1


class Bars(NamedTuple):
    """Rectangles of one kind: arrays of left, right (seconds), top, height (inches), strength."""

    left: Any
    right: Any
    top: Any
    height: Any
    strength: Any


def bands(
    trace: Trace, *, memory: bool = True, lanes: bool = True, host: bool = True,
    memory_height: float = 0.44, lane_height: float = 0.2, most: float = 9.0,
) -> tuple[list[Band], float]:  # fmt: skip
    """The strips from top to bottom and their total height, squeezed to ``most`` inches.

    Beyond 24 devices the picture grows again, so that each keeps a line of its own.
    """
    found: list[Band] = []
    y = 0.0
    sampled = {sample.device for sample in trace.memory}
    for device in trace.devices:
        if device == "host" and not (host and lanes):
            continue
        first = len(found)
        if memory and device in sampled:
            found.append(Band(device, "", y, memory_height))
            y += memory_height + 0.05
        for lane in _shown_lanes(trace, device) if lanes else []:
            depth = 1 + max(levels(spans_of(trace, device, lane)), default=0)
            height = _lane_height(device, lane, min(depth, MAX_LEVELS), lane_height)
            found.append(Band(device, lane, y, height, min(depth, MAX_LEVELS)))
            y += height + 0.03
        y += 0.16 if len(found) > first else 0.0
    total = max(y - 0.16, lane_height)
    scale = min(1.0, max(most, 0.375 * len(trace.devices)) / total)
    squeezed = [b._replace(top=b.top * scale, height=b.height * scale) for b in found]
    return squeezed, total * scale


def _shown_lanes(trace: Trace, device: str) -> list[str]:
    return trace.lanes(device)[: MAX_HOST_LANES if device == "host" else None]


def _lane_height(device: str, lane: str, depth: int, height: float) -> float:
    thin = 0.75 if device == "host" or lane in ("copy", "communication") else 1.0
    return height * thin * (1 + 0.6 * (depth - 1))


def spans_of(trace: Trace, device: str, lane: str) -> list[Span]:
    """Spans of one lane by start; of two that start together the longer comes first."""
    found = [span for span in trace.spans if (span.device, span.lane) == (device, lane)]
    return sorted(found, key=lambda span: (span.start, -span.end))


def levels(spans: Sequence[Span]) -> list[int]:
    """The level of each span (sorted by start): the first that is free when it starts.

    Spans that overlap by less than a nanosecond only touch: such is the rounding of clocks.
    """
    ends: list[float] = []
    result = []
    for span in spans:
        level = next((n for n, end in enumerate(ends) if end < span.start + 1e-9), len(ends))
        ends[level : level + 1] = [span.end]
        result.append(level)
    return result


def bars(spans: Sequence[Span], band: Band, pixel: float) -> dict[str, Bars]:
    """Rectangles by kind for the spans of one lane, where a pixel is ``pixel`` seconds wide."""
    level = np.array(levels(spans), int)
    start = np.array([span.start for span in spans])
    end = np.array([span.end for span in spans])
    kinds = np.array([span.kind for span in spans])
    result = {}
    for kind in dict.fromkeys(kinds.tolist()):
        chosen = (kinds == kind) & (level < band.levels)
        wide = chosen & (end - start >= pixel)
        parts = [(start[wide], end[wide], level[wide], np.ones(wide.sum()))]
        for one in range(band.levels):
            narrow = chosen & (end - start < pixel) & (level == one)
            left, right, strength = _coverage(start[narrow], end[narrow], pixel)
            parts.append((left, right, np.full(len(left), one), strength))
        left, right, lev, strength = (np.concatenate(column) for column in zip(*parts, strict=True))
        height = band.height / band.levels
        result[kind] = Bars(
            left, right, band.top + lev * height, np.full(len(left), height), strength
        )
    return result


def _coverage(start: Any, end: Any, pixel: float) -> tuple[Any, Any, Any]:
    """Runs of pixels that are about equally covered, and how much (in quarters, at least one)."""
    if not len(start):
        return start, end, end
    column = np.floor(start / pixel).astype(int)
    covered = np.bincount(column, weights=end - start) / pixel
    quarters = np.where(covered > 0, np.clip(np.ceil(covered * 4), 1, 4), 0)
    edges = np.flatnonzero(np.diff(quarters, prepend=0, append=0))
    left, right = edges[:-1], edges[1:]
    filled = quarters[left] > 0
    left, right = left[filled], right[filled]
    return left * pixel, right * pixel, quarters[left] / 4


def memory_steps(trace: Trace, device: str, pixel: float) -> tuple[Any, Any]:
    """Times and bytes of one device, held until the trace's end; at most 2 points per pixel."""
    samples = sorted((s.time, s.allocated) for s in trace.memory if s.device == device)
    time = np.array([t for t, _ in samples], float)
    held = np.array([allocated for _, allocated in samples], float)
    column = np.floor(time / pixel).astype(int)
    firsts = np.flatnonzero(np.diff(column, prepend=-1))
    if 2 * len(firsts) < len(time):
        # per pixel the peak, which people look for, and then the value that stays
        lasts = np.append(firsts[1:], len(time)) - 1
        peak = np.maximum.reduceat(held, firsts)
        time = np.column_stack([time[firsts], time[lasts]]).ravel()
        held = np.column_stack([peak, held[lasts]]).ravel()
    return np.append(time, trace.duration), np.append(held, held[-1:])


def time_unit(seconds: float) -> tuple[float, str]:
    """The factor and the name of the unit in which a duration reads well."""
    if seconds < 2e-3:
        return 1e6, "µs"
    return (1e3, "ms") if seconds < 2 else (1.0, "s")


def memory_unit(amount: float) -> tuple[float, str]:
    """The divisor and the name of the binary unit in which so many bytes read well."""
    for divisor, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if amount >= divisor:
            return float(divisor), name
    return 1.0, "B"


def memory_scale(trace: Trace) -> float:
    """Bytes at the top of every memory strip: the capacity, unless the strip would look empty."""
    peak = max((sample.allocated for sample in trace.memory), default=0)
    capacity = max(trace.capacity.values(), default=0)
    return float(capacity if peak >= capacity / 4 and capacity >= peak else peak or 1) * 1.08
