"""A naive simulator to check the scheduler against: it looks at everything, one tick at a time.

It knows kernels, copies between devices, collectives within a process, events, synchronisation,
starting and joining threads, and the GIL.  Written for clarity; costs are in whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from labutils.virtual.record import Entry


class Reference:
    """Plays ``programs`` (entries by thread); ``ends`` collects (entry id, start, end)."""

    def __init__(
        self, programs: dict[str, list[Entry]], held: int, free: int, engine: int, launch: int
    ) -> None:
        self.programs = {name: deque(entries) for name, entries in programs.items()}
        self.held, self.free, self.engine, self.launch = held, free, engine, launch
        self.started = ["main"]
        self.busy_until = dict.fromkeys(programs, 0)
        self.due: dict[str, Entry | None] = dict.fromkeys(programs)  # issued when busy_until comes
        self.gil_until, self.gil_queue = 0, []  # type: int, list[str]
        self.streams: dict[tuple[int, int], deque[Any]] = {}
        self.running: dict[tuple[int, int], int] = {}
        self.recorded: dict[Any, bool] = {}
        self.marks: dict[int, list[Any]] = {}
        self.ends: list[tuple[int, int, int]] = []
        self.now = 0

    def run(self) -> list[tuple[int, int, int]]:
        """(id of the entry, start, end) of every operation, in order of start."""
        while any(self.programs.values()) or any(self.due.values()) or any(self.streams.values()):
            self._streams()
            while any(self._thread(name) for name in self.started):  # the first that can, does
                self._streams()
            self.now += 1
            assert self.now < 200_000, "the program does not end"
        return sorted(self.ends, key=lambda item: (item[1], item[0]))

    def _streams(self) -> None:
        while any(self._try(key, queue) for key, queue in self.streams.items()):
            pass

    def _thread(self, name: str) -> bool:
        """Let one thread do one thing, if it can do it now."""
        if self.busy_until[name] > self.now:
            return False
        entry = self.due[name]
        if entry is not None:
            self.due[name] = None
            self._issue(entry)
            return True
        if not self.programs[name]:
            return False
        entry = self.programs[name][0]
        if entry.what in ("kernel", "copy", "collective"):
            return self._start_issuing(name, entry)
        if not self._may_go_on(entry):
            return False
        self.programs[name].popleft()
        if entry.what == "fork":
            self.started.append(entry.ref)
            self.busy_until[entry.ref] = self.now
        elif entry.what == "record":
            self.recorded[entry.ref] = False
            self._queue(entry.device, entry.stream).append((self.now, entry, ["record", entry.ref]))
        elif entry.what == "wait":
            self._queue(entry.device, entry.stream).append((self.now, entry, ["wait", entry.ref]))
        return True

    def _start_issuing(self, name: str, entry: Entry) -> bool:
        if "autograd" in name:
            self.busy_until[name] = self.now + self.engine
        else:
            if name not in self.gil_queue:
                self.gil_queue.append(name)
            if self.gil_until > self.now or self.gil_queue[0] != name:
                return False
            self.gil_queue.pop(0)
            self.gil_until = self.now + self.held
            self.busy_until[name] = self.now + self.held + self.free
        self.due[name] = self.programs[name].popleft()
        return True

    def _may_go_on(self, entry: Entry) -> bool:
        if entry.what == "join":
            finished = not self.programs[entry.ref] and not self.due[entry.ref]
            return finished and self.busy_until[entry.ref] <= self.now
        if entry.what == "sync":
            return self._synchronised(entry)
        return True

    def _synchronised(self, entry: Entry) -> bool:
        """Whether all streams have come to the marks that the first look put there."""
        if id(entry) not in self.marks:
            mine = [key for key in self.streams if key[0] == entry.device]
            self.marks[id(entry)] = [(key, object()) for key in mine]
            for key, mark in self.marks[id(entry)]:
                self.recorded[mark] = False
                self.streams[key].append((self.now, entry, ["record", mark]))
            self._streams()
        return all(self.recorded[mark] for _, mark in self.marks[id(entry)])

    def _queue(self, device: int, stream: int) -> deque[Any]:
        return self.streams.setdefault((device, stream), deque())

    def _issue(self, entry: Entry) -> None:
        if entry.what == "kernel":
            self._queue(entry.device, entry.stream).append((self.now, entry, ["run"]))
            return
        if entry.what == "copy":
            keys = [(entry.ref.source, entry.ref.source_stream), (entry.device, entry.stream)]
        else:
            keys = [(device, entry.stream) for device in entry.ref.devices]
        meeting = ["meet", keys]
        for key in keys:
            self._queue(*key).append((self.now, entry, meeting))

    def _try(self, key: tuple[int, int], queue: deque[Any]) -> bool:
        if not queue or self.running.get(key, 0) > self.now:
            return False
        issued, entry, (what, *more) = queue[0]
        if what == "wait":
            if not self.recorded.get(more[0], True):
                return False
            queue.popleft()
        elif what == "record":
            self.recorded[more[0]] = True
            queue.popleft()
        elif self.now < issued + self.launch:
            return False
        elif what == "run":
            self._start(entry, [key])
        else:
            meeting = queue[0][2]
            for other in more[0]:
                head = self.streams[other]
                free = self.running.get(other, 0) <= self.now
                if not head or head[0][2] is not meeting or not free:
                    return False
            self._start(entry, more[0])
        return True

    def _start(self, entry: Entry, keys: list[tuple[int, int]]) -> None:
        assert entry.kernel is not None
        end = self.now + entry.kernel.bytes_read
        for key in keys:
            self.streams[key].popleft()
            self.running[key] = end
        self.ends.append((id(entry), self.now, end))
