"""Streams, events, gates and engines: what operations queue in, wait for and occupy.

All times are whole nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

from ..virtual.record import COMM_STREAM, DEFAULT_STREAM, Entry
from .threads import Thread

Action = Callable[["Stream", int, Entry, Any], bool]
"""What a stream does with (issue time, entry, more); false: it has to wait and try again."""


class Event:
    """Something that has a time once ``missing`` streams have reached it."""

    __slots__ = ("missing", "time", "waiters")

    def __init__(self, missing: int = 1) -> None:
        self.time, self.missing = 0, missing
        self.waiters: list[Stream | Thread] = []


class Stream:
    """A queue of one device; ``pending`` is empty unless its first action has to wait."""

    __slots__ = ("device", "ends", "lane", "number", "pending", "tail")

    def __init__(self, device: int, number: int, depth: int) -> None:
        self.device, self.number, self.tail = device, number, 0
        self.lane = {DEFAULT_STREAM: "compute", COMM_STREAM: "communication"}.get(number, "")
        self.pending: deque[tuple[Action, int, Entry, Any]] = deque()
        self.ends: deque[int] = deque(maxlen=depth)
        """When the latest launches end: as many as the launch queue holds."""


class Gate:
    """A copy or collective, which may need several streams: it starts when all have arrived."""

    __slots__ = ("arrived", "done", "issued", "needed", "ready")

    def __init__(self, needed: int) -> None:
        self.needed, self.issued, self.ready = needed, 0, 0
        self.arrived: list[Stream] = []
        self.done = Event()


class Engine:
    """Something that does one thing at a time, reserved in the order of issue.

    A later operation may slip into a gap that earlier ones leave.
    """

    __slots__ = ("_ends", "_limit", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._limit = 256

    def fit(self, ready: int, length: int) -> int:
        """The first time from ``ready`` on at which the engine is free for ``length``."""
        starts, ends = self._starts, self._ends
        if not ends or ready >= ends[-1]:
            return ready
        for i in range(bisect_right(ends, ready), len(ends)):
            if ready + length <= starts[i]:
                break
            ready = ends[i]
        return ready

    def take(self, start: int, end: int, now: int) -> None:
        """Reserve from ``start`` to ``end``; nothing will ask for times before ``now`` again."""
        starts, ends = self._starts, self._ends
        if not ends or start > ends[-1]:
            starts.append(start)
            ends.append(end)
        elif start == ends[-1]:
            ends[-1] = end
        elif end > start:
            place = bisect_right(starts, start)
            starts.insert(place, start)
            ends.insert(place, end)
        if len(ends) > self._limit:
            past = bisect_right(ends, now)
            del starts[:past], ends[:past]
            self._limit = max(256, 2 * len(ends))


__all__ = ["Action", "Engine", "Event", "Gate", "Stream"]
