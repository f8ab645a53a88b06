"""``lab.watch``: follow what the GPUs do while a block of code runs.

A watch draws the live view while the block runs and keeps the :class:`Trace` afterwards.  What it
follows depends on the devices in use: virtual GPUs give a simulated trace of their recorded
operations, CUDA devices a measured one from PyTorch's profiler, and without either the spans that
the code names with ``lab.span`` are measured on the host.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from labutils.trace import MemorySample, Span, Trace

if TYPE_CHECKING:
    from labutils.figures import TraceFigure

PERIOD_S = 0.2
"""Time between two updates of the live view."""


class Source(Protocol):
    """Something to watch: spans and memory samples that only grow, and a trace at the end."""

    rows: Sequence[str]
    capacity: dict[str, int]
    kind: str
    """measured or simulated."""
    hardware: str
    spans: list[Span]
    memory: list[MemorySample]

    def start(self) -> None:
        """Begin to follow."""

    def poll(self) -> float:
        """Take in what is new; returns the seconds that the trace has reached."""

    def stop(self) -> Trace:
        """End, and return everything."""


class Watch:
    """A block of code that is watched; see :func:`watch`."""

    def __init__(self, title: str, source: Source, show: bool = True) -> None:
        self.title = title
        self._show = show
        self.trace = Trace(source.kind, source.hardware, title)
        """What happened; complete once the block has ended."""
        self._source = source

    def __enter__(self) -> Watch:
        from labutils.live import LiveView

        source = self._source
        source.start()
        self._view = LiveView(
            self.title, source.rows, source.capacity, source.kind, source.hardware
        )
        if self._show:
            self._view.show()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self.trace = self._source.stop()
        except Exception:
            if error is None:
                raise  # else what went wrong in the block is what matters
        self.trace.title = self.title
        if error is not None:
            self.trace.notes.append(f"ended by {type(error).__name__}")
        if self._show:
            self._view.close(self.trace)

    def picture(self) -> TraceFigure:
        """The static picture of the trace, as a matplotlib figure."""
        from labutils import figures

        return figures.overview(self.trace)

    def _follow(self) -> None:
        spans = samples = 0
        while not self._ended.wait(PERIOD_S):
            source = self._source
            now = source.poll()
            new_spans, new_samples = source.spans[spans:], source.memory[samples:]
            spans, samples = spans + len(new_spans), samples + len(new_samples)
            with contextlib.suppress(Exception):  # a lost front end must not harm the run
                self._view.update(new_spans, new_samples, now)


def watch(title: str = "run", *, show: bool = True) -> Watch:
    """Watch the GPUs while a block runs::

        with lab.watch("one step") as w:
            train_step()
        w.trace.save("step.json")

    In a notebook the live view is drawn meanwhile, and a picture stays in its place; with
    ``show=False`` only the trace is kept.
    """
    return Watch(title, _source(), show)


def _source() -> Source:
    import torch

    from labutils import virtual

    if virtual.is_enabled():
        from labutils.virtual.source import source

        return source()
    if torch.cuda.is_available():
        from labutils.cuda_source import CudaSource

        return CudaSource()
    return HostSource()


class HostSource:
    """Measures the spans named with ``lab.span`` on the host's clock."""

    rows: Sequence[str] = ()
    kind = "measured"
    hardware = "CPU"

    def __init__(self) -> None:
        self.capacity: dict[str, int] = {}
        self.spans: list[Span] = []
        self.memory: list[MemorySample] = []

    def start(self) -> None:
        from labutils import telemetry

        self._began = time.perf_counter()
        telemetry.add_sink(self)

    def begin(self, name: str, kind: str) -> tuple[str, str, float]:
        """A span begins (called by ``lab.span``)."""
        return name, kind, time.perf_counter()

    def end(self, token: tuple[str, str, float]) -> None:
        """That span ends."""
        name, kind, start = token
        thread = threading.current_thread()
        lane = "main" if thread is threading.main_thread() else thread.name
        began, now = self._began, time.perf_counter()
        self.spans.append(Span(name, start - began, now - began, "host", lane, kind))

    def poll(self) -> float:
        return time.perf_counter() - self._began

    def stop(self) -> Trace:
        from labutils import telemetry

        telemetry.remove_sink(self)
        return Trace(self.kind, self.hardware, spans=sorted(self.spans, key=lambda s: s.start))
