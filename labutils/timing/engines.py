"""Streams, events, gates and engines: what operations queue in, wait for and occupy.

All times are whole nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..virtual.record import COMM_STREAM, DEFAULT_STREAM, Copy, Entry
from .profiles import Profile
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


def reserve(engines: Sequence[Engine], ready: int, length: int, now: int) -> int:
    """Occupy all of them from the first time on at which they are free at once."""
    start, moved = ready, True
    while moved:
        before = start
        for engine in engines:
            start = engine.fit(start, length)
        moved = start != before
    for engine in engines:
        engine.take(start, start + length, now)
    return start


class Ways:
    """What lies between the memories, of which each part carries one copy at a time."""

    def __init__(self, profile: Profile) -> None:
        self._shared, self._link_is_bus = profile.bus_shared_by, profile.link_is_bus
        self._engines: dict[tuple[str, int], Engine] = {}

    def of_copy(self, copy: Copy) -> list[Engine]:
        """A way to or from the host, or the ports of two GPUs."""
        if copy.source < 0:
            return self._get([("h2d", copy.target // self._shared)])
        if copy.target < 0:
            return self._get([("d2h", copy.source // self._shared)])
        if copy.source == copy.target:
            return []
        return self._get([("out", copy.source), ("in", copy.target)])

    def of_collective(self, devices: Sequence[int]) -> list[Engine]:
        """The bus, both ways, where the GPUs have no other link; else nothing that copies use."""
        if not self._link_is_bus:
            return []
        places = sorted({device // self._shared for device in devices})
        return self._get([(way, place) for place in places for way in ("h2d", "d2h")])

    def _get(self, keys: list[tuple[str, int]]) -> list[Engine]:
        return [self._engines.setdefault(key, Engine()) for key in keys]


__all__ = ["Action", "Engine", "Event", "Gate", "Stream", "Ways", "reserve"]
