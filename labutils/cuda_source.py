"""Watching real GPUs: PyTorch's profiler for the timeline, its allocator for the memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import profile, record_function, supported_activities

from labutils.trace import MemorySample, Span, Trace
from labutils.watching import HostSource

MARKER = "lab.watch"
"""Marks in the profile when the watch began, to put both clocks on one axis."""


class CudaSource:
    """Gives ``lab.watch`` a measured trace of all CUDA devices.

    While the block runs, the live view shows memory and the spans named with ``lab.span``; kernels,
    copies and collectives come with the profile at the end.
    """

    kind = "measured"

    def __init__(self) -> None:
        devices = range(torch.cuda.device_count())
        self.rows: Sequence[str] = [f"GPU {i}" for i in devices]
        self.capacity = {f"GPU {i}": torch.cuda.mem_get_info(i)[1] for i in devices}
        names = dict.fromkeys(torch.cuda.get_device_name(i) for i in devices)
        self.hardware = f"{len(devices)} × {', '.join(names)}"
        self.memory: list[MemorySample] = []
        self._host = HostSource()
        self.spans: list[Span] = self._host.spans

    def start(self) -> None:
        """Begin to profile, at a moment when the devices have nothing left to do."""
        _wait_for_all(len(self.rows))
        self._profile = profile(activities=supported_activities())
        self._profile.__enter__()
        with record_function(MARKER):
            self._host.start()
        self.poll()

    def poll(self) -> float:
        """Sample the memory of every device; returns the seconds since the start."""
        now = self._host.poll()
        for i, row in enumerate(self.rows):
            self.memory.append(MemorySample(now, row, torch.cuda.memory_allocated(i)))
        return now

    def stop(self) -> Trace:
        """Wait for the devices, and return the profile with the memory samples."""
        _wait_for_all(len(self.rows))
        self.poll()
        named = self._host.stop().spans
        self._profile.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            self._profile.export_chrome_trace(str(path))
            trace = Trace.load(path)
        began = next((s.start for s in trace.spans if s.name == MARKER), 0.0)
        trace.spans = [s for s in trace.spans if s.name != MARKER]
        trace.spans += [_later(s, began) for s in named]
        trace.memory = [MemorySample(m.time + began, m.device, m.allocated) for m in self.memory]
        trace.hardware, trace.capacity = self.hardware, self.capacity
        return trace


def _later(span: Span, seconds: float) -> Span:
    start, end = span.start + seconds, span.end + seconds
    return Span(span.name, start, end, span.device, span.lane, span.kind, span.bytes, span.detail)


def _wait_for_all(devices: int) -> None:
    for i in range(devices):
        torch.cuda.synchronize(i)
