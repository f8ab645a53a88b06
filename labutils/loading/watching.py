"""``lab.watch_loading``: workers, pin thread, main thread and GPUs on one time axis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from labutils import telemetry, watching
from labutils.loading import loader as loading
from labutils.rundir import Follower
from labutils.trace import MemorySample, Span, Trace
from labutils.watching import Source, Watch

IDLE_MEANS = "from its first work to its last"
_PROBE = "watch_loading begins"


NOTHING = (
    "a lab.Loader tells what it does, and lab.span names what the code does; a plain DataLoader "
    "tells nothing"
)


def watch_loading(title: str = "loading", *, show: bool = True) -> Watch:
    """Watch a training loop while its block runs, with the workers of every ``lab.Loader``::

        with lab.watch_loading("four workers") as w:
            for batch in loader:
                step(batch)

    Each worker process has a lane of its own under "host", as have the pin thread, the main thread
    (its waits for batches, and what it names with ``lab.span``) and other threads that use
    ``lab.span``; GPUs have theirs.  Workers and threads are measured; a virtual GPU's work lasts as
    long as its profile says.

    Raises:
        ValueError: there are virtual GPUs whose time is simulated after the fact, which cannot
            share an axis with real workers.
    """
    from labutils import virtual

    if virtual.is_enabled() and not virtual.is_wall():
        raise ValueError(
            "watch_loading needs virtual GPUs that work in real time, since the workers do: "
            'lab.gpus(n, pace="wall").'
        )
    return Watch(title, LoadingSource(watching._source()), show)


class LoadingSource:
    """What a watch of this process follows anyway, and the files of the loaders' workers."""

    def __init__(self, process: Source) -> None:
        self._process = process
        self.kind, self.hardware = process.kind, process.hardware
        self.rows: Sequence[str] = ()  # GPUs that are not used here are not shown
        self.capacity: dict[str, int] = process.capacity
        self.spans: list[Span] = []
        self.memory: list[MemorySample] = []
        self._followers: dict[str, Follower] = {}
        self._taken = self._sampled = 0

    def start(self) -> None:
        """Begin to follow."""
        self._process.start()
        loading.watched(1)
        self._start_ns = time.monotonic_ns()
        with telemetry.span(_PROBE):  # where it lies in the end says where this clock's zero is
            pass

    def poll(self) -> float:
        """Take in what is new; returns the seconds since the start."""
        reached = self._process.poll()
        new = self._process.spans[self._taken :]
        self._taken += len(new)
        self.spans += filter(_is_shown, new)
        samples = self._process.memory[self._sampled :]
        self._sampled += len(samples)
        self.memory += [m for m in samples if m.allocated]
        self.spans += self._from_workers()
        return reached

    def stop(self) -> Trace:
        """End; returns everything."""
        try:
            trace = self._process.stop()
            self._from_workers()
        finally:
            loading.watched(-1)
        began = next((span.start for span in trace.spans if span.name == _PROBE), 0.0)
        workers = [s for follower in self._followers.values() for s in follower.trace.spans]
        moved = (replace(s, start=s.start + began, end=s.end + began) for s in workers)
        spans = [*filter(_is_shown, trace.spans), *moved]
        trace.spans = sorted(spans, key=lambda span: span.start)
        used = {span.device for span in spans}
        trace.memory = [m for m in trace.memory if m.device in used]
        trace.capacity = {d: nbytes for d, nbytes in trace.capacity.items() if d in used}
        if not spans:
            trace.notes.append(NOTHING)
        for device in (d for d in trace.devices if d != "host" and trace.busy(d)):
            trace.notes.append(f"{device} idle {idle_share(trace, device):.0%}, {IDLE_MEANS}")
        return trace

    def _from_workers(self) -> list[Span]:
        living = [each.run_directory for each in list(loading.loaders)]
        for directory in [*living, *loading.leaving]:
            if directory and directory not in self._followers:
                self._followers[directory] = Follower(directory, self._start_ns)
        return [span for follower in self._followers.values() for span in follower.poll()[0]]


def idle_share(trace: Trace, device: str = "GPU 0") -> float:
    """Share of the time, from a device's first computation to its last, in which it computes
    nothing; 1 if it never does.  (The start of the workers is thus left out.)"""
    work = [s for s in trace.spans if s.device == device and s.lane == "compute"]
    if not work:
        return 1.0
    first, last = min(s.start for s in work), max(s.end for s in work)
    return 1 - trace.busy(device) / (last - first)


def _is_shown(span: Span) -> bool:
    """The loader names pinning a batch; virtual GPUs name pinning each of its tensors."""
    return span.name != _PROBE and (span.name, span.kind) != ("pin", "other")
