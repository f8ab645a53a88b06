"""The discrete-event scheduler: an operation graph and a hardware profile give a trace.

Time is simulated in whole nanoseconds.  The events are those of host threads, kept in a heap
ordered by ``(time, rank)``; ranks are unique, so that ties are always broken alike.  At its event a
thread issues one entry of the log, and what that does on the devices is worked out at once
(``devices.py``).

Only the order of entries within one thread matters, not how the operating system interleaved the
threads in the log.  And a log may be fed in pieces, while the program still runs: a thread that
could still say something holds up all that would happen after it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from ..trace import Trace
from ..virtual.record import NATIVE, Entry, Graph
from .cost import Costs, nanoseconds
from .devices import Devices
from .engines import Event
from .profiles import Profile
from .threads import Thread, WorkerNames, first_rank, split_process


class Scheduler:
    """Plays log entries on ``devices`` GPUs of a profile; ``spans`` and ``memory`` only grow.

    Args:
        allocated: bytes on each device at the start.
        capacity: bytes that each device has.
        first: log number of the first entry that will be fed.
        merged: the devices are the ranks of several processes, whose threads are called
            ``rank 3/main``, and which meet in collectives; not the GPUs of one process.
        per_node: ranks on one node, where there are several; the profile's GPUs if None.
        costs: those of another scheduler on the same profile, to be used again.
    """

    def __init__(
        self,
        profile: Profile,
        devices: int,
        allocated: Sequence[int] = (),
        capacity: Sequence[int] = (),
        first: int = 0,
        merged: bool = False,
        per_node: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.profile, self._costs = profile, costs or Costs(profile)
        rows = [f"{'rank' if merged else 'GPU'} {i}" for i in range(devices)]
        self.capacity = dict(zip(rows, capacity, strict=False))
        nodes = per_node or profile.gpus
        self._devices = Devices(self._costs, rows, allocated, merged, nodes, self._wake)
        self.spans, self.memory = self._devices.spans, self._devices.memory
        self._heap: list[tuple[int, tuple[Any, ...], Thread]] = []
        self._threads: dict[str, Thread] = {}
        self._gils: dict[str, list[int]] = {}
        self._first, self._issued = first, array("q")
        """When each entry was issued, or -1."""
        self._children: dict[int, Thread] = {}
        self._after: dict[int, list[Thread]] = {}
        self._names, self._forks, self._finished = WorkerNames(), 0, False
        self._sync = nanoseconds(profile.host.sync_seconds)
        self._start_thread = nanoseconds(profile.host.thread_seconds)
        self._do: dict[str, Callable[[Thread, Entry, int], int | None]] = {
            "memory": self._mark, "record": self._mark, "wait": self._mark,
            "sync": self._synchronise, "fork": self._fork, "join": self._join,
            "after": self._go_after, "begin": self._bracket, "end": self._bracket,
            "host": self._bracket,
        }  # fmt: skip

    def feed(self, entries: Iterable[Entry]) -> None:
        """Take the next entries of the log, and decide all that they allow to decide."""
        for entry in entries:
            number = self._first + len(self._issued)
            self._issued.append(-1)
            self._hear(self._thread(entry.thread), number, entry)
        self._run()

    def finish(self) -> None:
        """The log is complete: decide the rest."""
        self._finished = True
        for thread in self._threads.values():
            self._undefer(thread)
        self._run()
        for thread in self._threads.values():
            thread.flush()

    def event_seconds(self, number: int) -> float:
        """When the event of that number, as it was recorded last, happened."""
        return self._devices.event_time(number) / 1e9

    def trace(self, dropped: int = 0) -> Trace:
        """What is decided so far."""
        trace = Trace("simulated", self.profile.name, dropped=dropped, capacity=self.capacity)
        trace.spans = sorted(self.spans, key=attrgetter("start"))
        trace.memory = sorted(self.memory, key=attrgetter("time"))
        stuck = sum(len(stream.pending) for stream in self._devices.streams.values())
        if self._finished and stuck:
            trace.notes.append(f"{stuck} operations wait for something that never happened.")
        return trace

    def _hear(self, thread: Thread, number: int, entry: Entry) -> None:
        """Queue an entry with its thread, and note whom it starts or waits for."""
        until = entry.ref if entry.what == "after" else 0
        if entry.what == "fork":
            self._children[number] = self._expect(entry.ref, thread, number)
        elif entry.what == "join":
            child = self._thread(entry.ref)
            child.live, until = False, child.last
            if child.parent not in (None, thread):  # another thread noticed that it had ended
                child.parent.deferred.append((number, entry, until))
                return
        if thread.deferred and entry.what != "fork":
            self._undefer(thread)
        thread.queue.append((number, entry, until))
        thread.last = number
        if thread.parked:
            self._resume(thread, thread.time)

    def _run(self) -> None:
        heap = self._heap
        while heap:
            self._devices.now, _, thread = heap[0]
            if self._ready(thread):
                heapq.heappop(heap)
                self._step(thread)
            elif thread.live and not self._finished:
                return
            else:
                heapq.heappop(heap)
                thread.parked = True
                if thread.parent:
                    thread.flush()

    def _ready(self, thread: Thread) -> bool:
        """Whether the thread's next entry can be issued.

        Threads started one after the other report in any order, so a run of forks has to be
        complete before it can be put in order.
        """
        queue = thread.queue
        if thread.due:
            return True
        if not queue or queue[0][1].what != "fork" or self._finished:
            return bool(queue)
        return any(entry.what != "fork" for _, entry, _ in queue)

    def _step(self, thread: Thread) -> None:
        """Let the thread go on for as long as it comes first.

        An operation costs the host time; it arrives at its device at the end of that.
        """
        heap, queue, devices, rank = self._heap, thread.queue, self._devices, thread.rank
        while True:
            entry = thread.due
            if entry is None:
                thread.number, entry, until = queue.popleft()
                if entry.kernel is None:
                    at = self._do[entry.what](thread, entry, until)
                else:
                    thread.due = entry
                    at = self._issue(thread, entry)
            else:
                at = self._arrive(thread, entry)
            if at is None:
                return  # what it waits for will wake it
            if thread.due is None:
                self._pass(thread, at)
                if not queue or queue[0][1].what == "fork":
                    break
            if heap and heap[0] < (at, rank):
                break
            devices.now = at
        heapq.heappush(heap, (at, rank, thread))

    def _pass(self, thread: Thread, at: int) -> None:
        """The thread has issued its entry, at time ``at``."""
        thread.time = self._issued[thread.number - self._first] = at
        if self._after:
            for waiting in self._after.pop(thread.number, ()):
                self._wake(waiting, at)

    def _wake(self, thread: Thread, at: int) -> None:
        """What the thread waited for happened at time ``at``."""
        at = thread.wait(at) + thread.cost_after
        self._pass(thread, at)
        self._resume(thread, at)

    def _resume(self, thread: Thread, at: int) -> None:
        thread.time, thread.parked = at, False
        heapq.heappush(self._heap, (at, thread.rank, thread))

    def _thread(self, name: str) -> Thread:
        thread = self._threads.get(name)
        if thread is None:
            gil = self._gils.setdefault(split_process(name)[0], [0])
            thread = self._threads[name] = Thread(name, gil, self.spans)
        return thread

    def _expect(self, name: str, parent: Thread, number: int) -> Thread:
        """A thread that its parent is going to start with entry ``number``."""
        self._threads.pop(name, None)
        child = self._thread(name)
        child.parent, child.live, child.parked, child.last = parent, True, False, number
        return child

    def _undefer(self, thread: Thread) -> None:
        thread.queue.extend(thread.deferred)
        thread.deferred.clear()

    def _fork(self, thread: Thread, entry: Entry, until: int) -> int:
        group = [(thread.number, entry)]
        while thread.queue and thread.queue[0][1].what == "fork":
            group.append(thread.queue.popleft()[:2])
        for number, fork in sorted(group, key=lambda item: first_rank(item[1].ref)):
            child, thread.number = self._children.pop(number), number
            cost = self._start_thread if child.python else 0
            self._pass(thread, thread.issue(fork.phase, cost, 0))
            child.lane = self._names.give(child.name)
            child.rank, self._forks = (2, self._forks), self._forks + 1
            self._resume(child, thread.time)
        return thread.time

    def _join(self, thread: Thread, entry: Entry, until: int) -> int | None:
        self._names.free(entry.ref)
        return self._go_after(thread, entry, until)

    def _go_after(self, thread: Thread, entry: Entry, until: int) -> int | None:
        """Go on once entry ``until`` has been issued; those before the first have been."""
        place = until - self._first
        if place < 0:
            return thread.time
        if place < len(self._issued) and self._issued[place] >= 0:
            return thread.wait(self._issued[place])
        thread.cost_after = 0
        self._after.setdefault(until, []).append(thread)
        return None

    def _bracket(self, thread: Thread, entry: Entry, until: int) -> int:
        if entry.what == "begin":
            thread.stack.append((str(entry.ref), thread.time))
        elif entry.what == "host":
            return thread.work(nanoseconds(entry.ref), entry.phase)
        elif thread.stack:
            name, start = thread.stack.pop()
            thread.show(name, start, thread.time, "span")
        return thread.time

    def _issue(self, thread: Thread, entry: Entry) -> int:
        """The host's part of an operation; returns its end."""
        held, free, *_ = self._costs.kernel(entry.kernel, thread.python and entry.ref != NATIVE)
        return thread.issue(entry.phase, held, free)

    def _arrive(self, thread: Thread, entry: Entry) -> int | None:
        """The operation arrives at its device; the thread may have to wait before or after."""
        devices, at = self._devices, thread.time
        if entry.what == "kernel":
            _, _, length, nbytes, detail = self._costs.kernel(entry.kernel, thread.python)
            if length:
                room = devices.room(entry)
                if room > at:
                    return thread.wait(room, "launch queue full")
                devices.compute(entry, at, (length, nbytes, detail))
            thread.due = None
            return at
        thread.due = None
        if entry.what == "collective":
            devices.collective(entry, at)
            return at
        copy, done = entry.ref, devices.copy(entry, at)
        pageable = min(copy.source, copy.target) < 0 and not copy.pinned
        return self._await(thread, done) if copy.blocking or pageable else at

    def _mark(self, thread: Thread, entry: Entry, until: int) -> int:
        """What goes to a stream and costs the host nothing."""
        devices = self._devices
        act = {"memory": devices.sample, "record": devices.record, "wait": devices.wait}
        act[entry.what](entry, thread.time)
        return thread.time

    def _synchronise(self, thread: Thread, entry: Entry, until: int) -> int | None:
        return self._await(thread, self._devices.all_done(entry, thread.time))

    def _await(self, thread: Thread, event: Event) -> int | None:
        """Host waits for the event, and then for cudaStreamSynchronize to return."""
        if event.missing:
            thread.cost_after = self._sync
            event.waiters.append(thread)
            return None
        return thread.wait(event.time) + self._sync


def schedule(graph: Graph, profile: Profile) -> Trace:
    """The trace of ``graph`` on ``profile``."""
    player = Scheduler(profile, graph.devices, graph.allocated, graph.capacity, graph.first)
    player.feed(graph.entries)
    player.finish()
    return player.trace(graph.dropped)


__all__ = ["Scheduler", "schedule"]
