"""What happened when: spans on lanes, and memory over time.

Everything that can be watched is a :class:`Trace`, whether a clock measured it or the scheduler
computed it.  A trace is kept as Chrome Trace Event JSON, which https://ui.perfetto.dev opens, and
what ``torch.profiler`` exports can be read as well.

>>> trace = Trace("simulated", "A100-SXM4-80GB")
>>> trace.spans.append(Span("addmm", 0.0, 0.002, "GPU 0", "compute", "forward"))
>>> trace.busy("GPU 0")
0.002
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

KINDS = (
    "read", "decode", "augment", "collate", "data", "copy", "forward", "backward", "communication",
    "optimizer", "span", "wait", "other",
)  # fmt: skip
"""Classes of spans; each has one colour in every figure (``labutils.colours``)."""

IDLE_KINDS = frozenset({"data", "wait", "span"})
"""Kinds in which the device itself does no work: waits, and the brackets that people name."""

LANES = ("compute", "copy", "communication")
"""Lanes of a GPU, in the order in which they are drawn."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one lane; times in seconds since the trace's start."""

    name: str
    start: float
    end: float
    device: str
    lane: str
    kind: str
    bytes: int = 0
    detail: str = ""

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MemorySample:
    """From ``time`` (seconds) on, ``device`` holds ``allocated`` bytes."""

    time: float
    device: str
    allocated: int


@dataclass
class Trace:
    """Spans and memory samples of one run, with where they come from.

    ``source`` is "measured" or "simulated", ``hardware`` names what was measured or simulated,
    ``capacity`` holds bytes per device where known, ``dropped`` counts entries that were lost.
    """

    source: str = "measured"
    hardware: str = ""
    title: str = ""
    spans: list[Span] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    capacity: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Seconds from the trace's start to the last thing that is known of it."""
        ends = max((span.end for span in self.spans), default=0.0)
        return max(ends, max((sample.time for sample in self.memory), default=0.0))

    @property
    def devices(self) -> list[str]:
        """Devices in natural order ("GPU 2" before "GPU 10"), the host last."""
        names = {span.device for span in self.spans} | {sample.device for sample in self.memory}
        return sorted(
            names | self.capacity.keys(), key=lambda name: (name == "host", natural(name))
        )

    def of_rank(self, rank: int) -> list[Span]:
        """The spans of a rank, whose row has one of two names (:func:`rank_rows`)."""
        rows = rank_rows(rank)
        return [span for span in self.spans if span.device in rows]

    def lanes(self, device: str) -> list[str]:
        """Lanes of a device: compute, copy, communication ("main" on the host), then the others."""
        names = {span.lane for span in self.spans if span.device == device}
        first = (*LANES, "main")
        return sorted(names, key=lambda lane: (
            first.index(lane) if lane in first else len(first), natural(lane)))  # fmt: skip

    def busy(self, device: str, lane: str = "compute") -> float:
        """Seconds in which the lane works at least one span (waits do not count)."""
        return _union(
            (span.start, span.end)
            for span in self.spans
            if span.device == device and span.lane == lane and span.kind not in IDLE_KINDS
        )

    def utilisation(self, device: str) -> float:
        """Share of the trace's duration in which the device computes, from 0 to 1."""
        return self.busy(device) / self.duration if self.duration else 0.0

    def peak_memory(self, device: str) -> int:
        """The most bytes that the device held at once; 0 if nothing is known."""
        return max((s.allocated for s in self.memory if s.device == device), default=0)

    def window(self, start: float, end: float) -> Trace:
        """The part from ``start`` to ``end`` (seconds), as a trace whose own start is ``start``."""
        if not end > start:
            raise ValueError(f"a window must end after it starts, not from {start} s to {end} s.")
        spans = [
            replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
            for span in self.spans
            if span.start < end and (span.end > start or span.start >= start)
        ]
        return replace(self, spans=spans, memory=self._memory_in(start, end),
                       capacity=dict(self.capacity), notes=list(self.notes))  # fmt: skip

    def _memory_in(self, start: float, end: float) -> list[MemorySample]:
        held: dict[str, int] = {}
        inside: list[MemorySample] = []
        for sample in sorted(self.memory, key=lambda sample: sample.time):
            if start < sample.time < end:
                inside.append(replace(sample, time=sample.time - start))
            elif sample.time <= start:
                held[sample.device] = sample.allocated
        first = [MemorySample(0.0, device, allocated) for device, allocated in held.items()]
        held.update((sample.device, sample.allocated) for sample in inside)
        last = [MemorySample(end - start, device, allocated) for device, allocated in held.items()]
        return first + inside + last

    def summary(self) -> str:
        """A table in plain text: per device busy time, utilisation and peak memory."""
        rows = [("device", "compute", "utilisation", "copy", "communication", "peak memory")]
        for device in self.devices:
            times = [f"{self.busy(device, lane) * 1e3:.2f} ms" for lane in LANES]
            peak = f"{self.peak_memory(device) / 2**20:,.1f} MiB"
            if device != "host":
                share = f"{self.utilisation(device):.0%}"
                rows.append((device, times[0], share, times[1], times[2], peak))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.duration * 1e3:.2f} ms, {self.source} · {self.hardware}".rstrip(" ·")]
        for row in rows if len(rows) > 1 else []:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(cells))
        return "\n".join(lines + ([f"{self.dropped} entries were lost"] if self.dropped else []))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome Trace Event JSON (compressed if the name ends in ``.gz``)."""
        from labutils import chrome

        chrome.save(self, Path(path))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Trace:
        """Read what :meth:`save` or ``torch.profiler``'s ``export_chrome_trace`` wrote.

        Raises ValueError, in one sentence, for a file that is neither.
        """
        from labutils import chrome

        return chrome.load(Path(path))


def rank_rows(rank: int) -> tuple[str, str]:
    """The names of a rank's row: where it computes on the CPU, and where on its GPU."""
    return f"rank {rank}", f"GPU {rank}"


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key in which "GPU 10" comes after "GPU 2"."""
    parts = re.findall(r"\d+|\D+", name)
    return [(1, int(part), "") if part.isdigit() else (2, 0, part) for part in parts]


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
