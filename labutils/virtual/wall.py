"""Virtual GPUs in real time: host threads wait for them as they would wait for real ones.

Every line of the recorder's log goes to a :class:`Pacer` at the moment at which the program issues
it.  What the devices do with it, and when they will have done it, follows from the profile
(``labutils.timing.devices``, the same as in a simulation after the fact); a thread that has to wait
sleeps until then.  The devices need no CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from labutils.timing.cost import Costs
from labutils.timing.devices import Devices
from labutils.timing.profiles import Profile
from labutils.timing.threads import SHORT_WAIT
from labutils.trace import MemorySample, Span
from labutils.virtual.record import Entry
from labutils.virtual.state import MOST_DEVICES

PAUSE = 5_000_000
"""Nanoseconds without an operation after which a host thread is no longer issuing."""
KEPT = 10_000
"""Spans kept while nobody watches."""

_WAITS = {"kernel": "launch queue full", "copy": "wait for copy", "sync": "synchronize"}
"""What a host thread waits for, by the line of the log at which it does."""


class Clock:
    """The host's monotonic clock, in nanoseconds.  (Tests have one of their own.)"""

    def now(self) -> int:
        return time.monotonic_ns()

    def wait_until(self, moment: int) -> None:
        """Sleep; other threads go on."""
        while (left := moment - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)


class Pacer:
    """Says when the devices have done what they were given, and lets threads wait for it.

    Times are nanoseconds of ``clock``.  ``spans`` (of the devices and, while somebody watches, of
    the host's threads) and ``memory`` only grow while somebody watches.
    """

    def __init__(
        self, profile: Profile, allocated: Sequence[int], clock: Clock | None = None
    ) -> None:
        self.clock = clock or Clock()
        self.lock = threading.Lock()
        self._costs = Costs(profile)
        rows = [f"GPU {i}" for i in range(MOST_DEVICES)]
        self._devices = Devices(
            self._costs, rows, allocated, False, profile.gpus, lambda thread, at: None
        )
        self.spans, self.memory = self._devices.spans, self._devices.memory
        self.memory.clear()
        self._lanes = HostLanes(self.spans)
        self.warned = False
        """It has been said that there are no values."""
        self._watchers = 0
        self._landings: list[tuple[int, Callable[[], object]]] = []
        devices = self._devices
        self._acts: dict[str, Callable[[Entry, int], int | None]] = {
            "kernel": self._kernel, "copy": self._copy, "sync": self._sync,
            "collective": devices.collective, "memory": devices.sample,
            "record": devices.record, "wait": devices.wait,
        }  # fmt: skip

    def arrive(self, entry: Entry) -> int | None:
        """Give the devices a line of the log now; returns until when its thread has to wait."""
        act = self._acts.get(entry.what)
        if act is None:
            return None
        with self.lock:
            at = self._devices.now = self.clock.now()
            until = act(entry, at)
            if not self._watchers:
                self._forget()
            elif entry.kernel is not None:
                self._lanes.issue(at, entry.phase)
        return until

    def wait(self, until: int, entry: Entry) -> None:
        """Let the calling thread sleep until that moment, because of ``entry``."""
        start = self.clock.now()
        self.clock.wait_until(until)
        self._land(until)
        if self._watchers:
            with self.lock:
                self._lanes.wait(_WAITS[entry.what], start, self.clock.now())

    def event_time(self, number: int) -> int | None:
        """When the event of that number happens; None if these devices do not know it."""
        with self.lock:
            event = self._devices.known_event(number)
        return None if event is None else event.time

    def passed(self, moment: int) -> bool:
        """Whether it is past that moment."""
        over = self.clock.now() >= moment
        if over:
            self._land(moment)
        return over

    def done(self, device: int, stream: int | None = None) -> int:
        """When ``device`` (or a stream of it) has done all that it was given so far."""
        with self.lock:
            streams = self._devices.streams.items()
            tails = [s.tail for (d, n), s in streams if d == device and stream in (None, n)]
        return max(tails, default=0)

    def drain(self) -> None:
        """Wait until no device has anything left to do."""
        until = max(self.done(device) for device in range(MOST_DEVICES))
        self.clock.wait_until(until)
        self._land(until)

    def land(self, device: int, stream: int, action: Callable[[], object]) -> None:
        """Do ``action``, such as filling the target of a copy, when the host has waited for what
        that stream was given so far."""
        self._landings.append((self.done(device, stream), action))

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """The calling thread is busy for as long as the block runs."""
        start = self.clock.now()
        yield
        if self._watchers:
            with self.lock:
                self._lanes.show(name, start, self.clock.now(), "other")

    def watch(self) -> int:
        """Keep all spans from now on; returns how many there are already."""
        with self.lock:
            self._watchers += 1
            return len(self.spans)

    def unwatch(self) -> None:
        """One watcher fewer."""
        with self.lock:
            self._watchers -= 1

    def since(self, spans: int, samples: int) -> tuple[list[Span], list[MemorySample]]:
        """Spans and memory samples from those numbers on; times in seconds of the clock."""
        with self.lock:
            self._lanes.flush()
            return self.spans[spans:], self.memory[samples:]

    def _kernel(self, entry: Entry, at: int) -> int | None:
        _, _, length, nbytes, detail = self._costs.kernel(entry.kernel, True)
        if not length:
            return None
        room = self._devices.room(entry)
        self._devices.compute(entry, max(at, room), (length, nbytes, detail))
        return room if room > at else None

    def _copy(self, entry: Entry, at: int) -> int | None:
        copy, done = entry.ref, self._devices.copy(entry, at)
        pageable = min(copy.source, copy.target) < 0 and not copy.pinned
        return done.time if copy.blocking or pageable else None

    def _sync(self, entry: Entry, at: int) -> int:
        return self._devices.all_done(entry, at).time

    def _forget(self) -> None:
        if len(self.spans) > KEPT:
            self.spans.clear()
        if len(self.memory) > KEPT:
            self.memory.clear()

    def _land(self, moment: int) -> None:
        """Do what has landed by that moment."""
        if self._landings:
            due = [action for at, action in self._landings if at <= moment]
            self._landings = [pair for pair in self._landings if pair[0] > moment]
            for action in due:
                action()


class HostLanes:
    """What the host's threads are seen to do: issue operations, one after the other, and wait."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._issuing: dict[str, tuple[str, int, int, int]] = {}
        """Lane: (phase, start, time of the latest operation, how many)."""

    def issue(self, at: int, phase: str) -> None:
        """The calling thread has issued an operation."""
        lane = lane_of(threading.current_thread())
        before, start, latest, count = self._issuing.get(lane, (phase, at, at, 0))
        if phase != before or at - latest > PAUSE:
            self.flush(lane)
            start, count = at if at - latest > PAUSE else latest, 0
        self._issuing[lane] = phase, start, at, count + 1

    def wait(self, name: str, start: int, end: int) -> None:
        """The calling thread has waited."""
        if end - start < SHORT_WAIT:
            return
        self.show(name, start, end, "wait")

    def show(self, name: str, start: int, end: int, kind: str) -> None:
        """A span of the calling thread."""
        lane = lane_of(threading.current_thread())
        self.flush(lane)
        self._spans.append(Span(name, start / 1e9, end / 1e9, "host", lane, kind))

    def flush(self, lane: str | None = None) -> None:
        """Show what ``lane`` (all, if None) has issued until now as one span."""
        for name in [lane] if lane else list(self._issuing):
            phase, start, end, count = self._issuing.pop(name, ("", 0, 0, 0))
            if end > start:
                issue, detail = f"issue {phase}".rstrip(), f"{count} operations"
                self._spans.append(
                    Span(issue, start / 1e9, end / 1e9, "host", name, "other", 0, detail)
                )


def lane_of(thread: threading.Thread) -> str:
    """The host's row of a thread."""
    if thread is threading.main_thread():
        return "main"
    return "pin thread" if "_pin_memory_loop" in thread.name else thread.name


__all__ = ["Clock", "HostLanes", "Pacer", "lane_of"]
