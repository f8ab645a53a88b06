"""Watching virtual GPUs in real time: their spans appear when they have happened."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from operator import attrgetter

from labutils import telemetry
from labutils.trace import MemorySample, Span, Trace
from labutils.virtual import journal
from labutils.virtual.state import state
from labutils.virtual.wall import Pacer, lane_of


class WallSource:
    """Gives ``lab.watch`` what the devices of a :class:`Pacer` do (simulated) and what the threads
    of the host do meanwhile (measured), on the host's clock."""

    kind = "simulated"

    def __init__(self, pacer: Pacer) -> None:
        self.hardware = f"{state.profile} in real time, host measured"
        self.rows: Sequence[str] = [f"GPU {i}" for i in range(state.devices)]
        self.capacity = dict(zip(self.rows, state.ledger.capacity, strict=False))
        self.spans: list[Span] = []
        self.memory: list[MemorySample] = []
        self.began_ns = 0
        """The trace's start, in nanoseconds of ``time.monotonic_ns``."""
        self._pacer = pacer
        self._coming: list[tuple[float, int, Span | MemorySample]] = []
        """A heap of what is decided and has not happened yet."""
        self._count = 0

    def start(self) -> None:
        """Begin, at a moment when the devices have nothing left to do."""
        self._pacer.drain()
        self._sample_all()
        self._seen = self._pacer.watch(), len(self._pacer.memory)
        self.began_ns = self._pacer.clock.now()
        self.memory += self._held(0.0)
        telemetry.add_sink(self)

    def begin(self, name: str, kind: str) -> tuple[str, str, int]:
        """A span begins (called by ``lab.span``)."""
        return name, kind, self._pacer.clock.now()

    def end(self, token: tuple[str, str, int]) -> None:
        """That span ends."""
        name, kind, start = token
        lane, end = lane_of(threading.current_thread()), self._pacer.clock.now()
        self.spans.append(Span(name, self._since(start), self._since(end), "host", lane, kind))

    def poll(self) -> float:
        """Take in what has happened by now; returns the seconds since the start."""
        now = self._pacer.clock.now()
        spans, samples = self._pacer.since(*self._seen)
        self._seen = self._seen[0] + len(spans), self._seen[1] + len(samples)
        ends: list[tuple[float, Span | MemorySample]] = [(s.end, s) for s in spans]
        ends += [(m.time, m) for m in samples]
        for end, item in ends:
            self._count += 1
            heapq.heappush(self._coming, (end, self._count, item))
        while self._coming and self._coming[0][0] <= now / 1e9:
            self._take(heapq.heappop(self._coming)[2])
        return self._since(now)

    def stop(self) -> Trace:
        """Wait for the devices; returns the whole trace."""
        telemetry.remove_sink(self)
        self._sample_all()
        self._pacer.drain()
        reached = self.poll()
        self._pacer.unwatch()
        trace = Trace(self.kind, self.hardware, capacity=self.capacity)
        trace.spans = sorted(self.spans, key=attrgetter("start"))
        trace.memory = [*sorted(self.memory, key=attrgetter("time")), *self._held(reached)]
        return trace

    def _take(self, item: Span | MemorySample) -> None:
        if isinstance(item, MemorySample):
            time = self._since(round(item.time * 1e9))
            self.memory.append(MemorySample(time, item.device, item.allocated))
            return
        start, end = (self._since(round(t * 1e9)) for t in (item.start, item.end))
        self.spans.append(
            Span(item.name, start, end, item.device, item.lane, item.kind, item.bytes, item.detail)
        )

    def _since(self, moment: int) -> float:
        return (moment - self.began_ns) / 1e9

    def _held(self, time: float) -> list[MemorySample]:
        held = zip(self.rows, state.ledger.allocated, strict=False)
        return [MemorySample(time, row, nbytes) for row, nbytes in held]

    def _sample_all(self) -> None:
        for index in range(state.devices):
            journal.sample_memory(index)
