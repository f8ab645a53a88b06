"""Host threads as the scheduler sees them: what they do with their time, and what they are called.

All times are whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..trace import Span
from ..virtual.record import Entry, thread_order

SHORT_WAIT = 200_000
"""Waits of a host thread below this are summed up, longer ones shown one by one."""


class Thread:
    """A host thread: its unread entries, its clock, and what it has been doing lately.

    Args:
        gil: one shared cell per process: the time at which the GIL becomes free.
        spans: where its spans go.
    """

    __slots__ = (
        "_busy_from", "_count", "_phase", "_waited", "cost_after", "deferred", "due", "gil",
        "lane", "last", "live", "name", "number", "parent", "parked", "python", "queue", "rank",
        "spans", "stack", "time",
    )  # fmt: skip

    def __init__(self, name: str, gil: list[int], spans: list[Span]) -> None:
        self.name, self.lane, self.rank = name, name, first_rank(name)
        self.gil, self.spans = gil, spans
        self.python = "autograd" not in name
        """The autograd engine's threads are C++ and need no GIL."""
        self.queue: deque[tuple[int, Entry, int]] = deque()
        """(log number, entry, log number that a join waits for) not issued yet."""
        self.deferred: list[tuple[int, Entry, int]] = []
        """Joins of this thread's children that other threads logged before it went on."""
        self.parent: Thread | None = None
        self.live = split_process(name)[1] == "main"
        """It may still say something, so time must not pass it by."""
        self.parked = True
        """Neither in the heap nor waiting for anything."""
        self.time = 0
        self.last = -1
        """Log number of the last entry fed."""
        self.number = -1
        """Log number of the entry being issued."""
        self.due: Entry | None = None
        """The operation that arrives at its device when the clock is ``time``."""
        self.cost_after = 0
        """Host time to spend after the present wait."""
        self.stack: list[tuple[str, int]] = []
        self._phase, self._busy_from, self._waited, self._count = "", -1, 0, 0

    def issue(self, phase: str, held: int, free: int) -> int:
        """Spend host time, the first part of it under the GIL; returns the end."""
        start, gil = self.time, self.gil
        if held:
            if gil[0] > start:
                start = self.wait(gil[0], "wait for the GIL")
            gil[0] = start + held
        if phase != self._phase or self._busy_from < 0:
            self.flush()
            self._phase, self._busy_from = phase, start
        self._count += 1
        self.time = start + held + free
        return self.time

    def wait(self, until: int, name: str = "wait") -> int:
        """Do nothing before ``until``; returns the time at which the thread goes on."""
        length = until - self.time
        if length <= 0:
            return self.time
        if length < SHORT_WAIT:
            self._waited += length
        else:
            self.flush()
            self.show(name, self.time, until, "wait")
        self.time = until
        return until

    def work(self, length: int, phase: str) -> int:
        """Be busy with work of its own; returns the end."""
        self.flush()
        kind = "data" if phase == "data" else "other"
        self.show(phase or "host", self.time, self.time + length, kind)
        self.time += length
        return self.time

    def flush(self) -> None:
        """Show what has been issued since the last flush as one span."""
        if 0 <= self._busy_from < self.time:
            detail = f"{self._count} operations"
            if self._waited:
                detail += f", {self._waited / 1e6:.3g} ms of it waiting"
            self.show(f"issue {self._phase}".rstrip(), self._busy_from, self.time, "other", detail)
        self._busy_from, self._waited, self._count = -1, 0, 0

    def show(self, name: str, start: int, end: int, kind: str, detail: str = "") -> None:
        """Append a span on this thread's lane."""
        self.spans.append(Span(name, start / 1e9, end / 1e9, "host", self.lane, kind, 0, detail))


class WorkerNames:
    """Names of host rows that do not depend on how many threads Python started before."""

    def __init__(self) -> None:
        self._used: dict[str, str] = {}

    def give(self, name: str) -> str:
        """``Thread-12 (_worker)`` becomes the first free of ``worker 0``, ``worker 1`` …"""
        prefix, short = split_process(name)
        if not short.startswith("Thread"):
            return name
        taken, number = set(self._used.values()), 0
        while f"{prefix}worker {number}" in taken:
            number += 1
        self._used[name] = f"{prefix}worker {number}"
        return self._used[name]

    def free(self, name: str) -> None:
        """The thread has ended: its name can be given again."""
        self._used.pop(name, None)


def split_process(name: str) -> tuple[str, str]:
    """``rank 3/main`` is thread ``main`` of the process ``rank 3/``; ``main`` is of ````."""
    prefix, slash, short = name.rpartition("/")
    return prefix + slash, short


def first_rank(name: str) -> tuple[Any, ...]:
    """Who goes first at equal times: main threads, then others in natural order."""
    prefix, short = split_process(name)
    return 0 if short == "main" else 1, thread_order(prefix), thread_order(short), name


__all__ = ["Thread", "WorkerNames", "first_rank", "split_process"]
