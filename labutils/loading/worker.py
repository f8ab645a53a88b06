"""What runs inside a loader's workers: the user's data set and functions, with a clock around them.

Each batch comes back in an :class:`Envelope` that says which worker made it and how long it took.
While somebody watches, a worker also appends its spans to a file of its own in the run directory,
in the format of :mod:`labutils.telemetry`, one write for each batch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from labutils import telemetry
from labutils.loading.byvalue import ByValue

WATCHED = "watched"
"""A file of this name in the run directory means: somebody watches, write spans."""

PIN_THREAD = "pin thread"

_HEADER = {"rank": 0, "device": "host", "hardware": "", "capacity": 0, "offset_ns": 0,
           "error_ns": 0}  # fmt: skip
"""First line of a worker's file: whose spans follow, see :mod:`labutils.rundir`."""


@dataclass(slots=True)
class Envelope:
    """A batch with what is known of its making; times are ``time.monotonic_ns``."""

    data: Any
    worker: int
    """-1: made in the process that iterates."""
    started_ns: int
    ended_ns: int
    cpu_ns: int
    """CPU time of the worker process (of the thread, without workers)."""
    collate_ns: int = 0
    """Time in the collate function, which is part of the whole."""
    queued_ns: int = 0
    """Time for which the worker could have gone on, but no core was free (known on Linux)."""

    def pin_memory(self) -> Envelope:
        """DataLoader calls this, in its pin thread (or, without workers, in the main thread)."""
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            thread.name = PIN_THREAD
        with telemetry.span("pin", "copy"):
            self.data = pin_memory(self.data)
        return self


class _Clock(threading.local):
    """Times of the batch that this thread is making."""

    worker = -1
    started_ns = 0
    cpu_ns = 0
    queued_ns = 0
    spans: Spans | None = None
    _counter: tuple[int, io.FileIO | None] = (0, None)
    """The process that opened it, and the system's file on this thread."""

    def queued(self) -> int:
        """Nanoseconds for which this thread has waited for a core so far; 0 where nobody counts.

        The second number of ``/proc/…/schedstat``: time on a run queue (Linux,
        Documentation/scheduler/sched-stats).
        """
        process, file = self._counter
        if process != os.getpid():
            file = None
            with contextlib.suppress(OSError):
                file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
            self._counter = os.getpid(), file
        if file is None:
            return 0
        try:
            return int(os.pread(file.fileno(), 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return 0

    def begin(self) -> None:
        """The first sample of a batch is about to be made (later ones of it change nothing)."""
        if not self.started_ns:
            self.started_ns = time.monotonic_ns()
            self.queued_ns = self.queued()
            if self.worker < 0:
                self.cpu_ns = time.thread_time_ns()

    def seal(self, data: Any, collate_ns: int) -> Envelope:
        """The batch is complete."""
        now = time.monotonic_ns()
        cpu = time.thread_time_ns() if self.worker < 0 else time.process_time_ns()
        started = self.started_ns or now
        envelope = Envelope(
            data, self.worker, started, now, cpu - self.cpu_ns, collate_ns,
            self.queued() - self.queued_ns,
        )  # fmt: skip
        self.started_ns, self.cpu_ns = 0, cpu
        if self.spans is not None:
            self.spans.flush()
        return envelope


clock = _Clock()


class Spans:
    """The sink of a worker: keeps what ``lab.span`` names, and writes a batch's spans at once.

    It listens only while somebody watches; a look at the run directory per batch tells.
    """

    def __init__(self, directory: str, worker: int) -> None:
        self.lines: list[tuple[int, int, str, str]] = []
        self.watched = False
        self._lane = f"worker {worker}"
        self._flag = os.path.join(directory or os.devnull, WATCHED)
        self._path = os.path.join(directory, f"rank-worker-{worker}-{os.getpid()}.jsonl")
        self._file: io.FileIO | None = None
        self.flush()

    def begin(self, name: str, kind: str) -> tuple[str, str, int]:
        return name, kind, time.monotonic_ns()

    def end(self, token: tuple[str, str, int]) -> None:
        name, kind, started = token
        self.lines.append((started, time.monotonic_ns(), name, kind))

    def flush(self) -> None:
        """Write what there is, and see whether anybody watches."""
        if self.lines:
            text = "".join(
                f"[{start},{end},{telemetry.rest_of_line(name, kind, self._lane, 0, '')}"
                for start, end, name, kind in self.lines
            )
            with contextlib.suppress(OSError):
                if self._file is None:
                    self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
                    text = text if self._file.tell() else json.dumps(_HEADER) + "\n" + text
                self._file.write(text.encode())
            self.lines = []
        self.watched = os.path.exists(self._flag)
        telemetry._sinks[:] = [self] if self.watched else []


class _Around:
    """Something of the user's, ``inner``, which travels by value; all else is asked of it."""

    def __init__(self, inner: Any) -> None:
        self._held = ByValue(inner)

    @property
    def inner(self) -> Any:
        return self._held.value

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class Samples(_Around, Dataset[Any]):
    """The user's data set with a clock."""

    def __getitem__(self, index: Any) -> Any:
        clock.begin()
        return self._one(index) if _watched() else self.inner[index]

    def __getitems__(self, indices: Any) -> Any:
        """A batch's samples: DataLoader prefers this, and it costs the clock one look a batch."""
        clock.begin()
        inner = self.inner
        if callable(getattr(inner, "__getitems__", None)):
            return _named(inner.__getitems__, indices)
        make = self._one if _watched() else inner.__getitem__
        return [make(index) for index in indices]

    def _one(self, index: Any) -> Any:
        return _named(self.inner.__getitem__, index)


class Stream(_Around, IterableDataset[Any]):
    """The same for an iterable data set."""

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.inner)
        while True:
            clock.begin()
            sample = _named(next, samples, _END)
            if sample is _END:
                return
            yield sample


def timed(dataset: Any) -> Any:
    """``dataset`` with a clock around it, of the same style."""
    if isinstance(dataset, _Around):
        return dataset
    if isinstance(dataset, IterableDataset):
        return Stream(dataset)
    return Samples(dataset)


class Collate(_Around):
    """The user's collate function with a clock; puts the batch into an envelope."""

    def __call__(self, samples: Any) -> Envelope:
        started = time.monotonic_ns()
        with telemetry.span("collate"):
            data = self.inner(samples)
        return clock.seal(data, time.monotonic_ns() - started)


class Start(_Around):
    """The ``worker_init_fn``: begins recording, then calls the user's own."""

    def __init__(self, directory: str, inner: Callable[[int], None] | None) -> None:
        super().__init__(inner)
        self.directory = directory

    def __call__(self, worker: int) -> None:
        clock.worker, clock.cpu_ns = worker, time.process_time_ns()
        clock.spans = Spans(self.directory, worker)  # a forked worker had its parent's sinks
        info: Any = get_worker_info()
        if isinstance(info.dataset, _Around):  # the user's functions expect their own
            object.__setattr__(info, "dataset", info.dataset.inner)
        if self.inner is not None:
            self.inner(worker)


def _watched() -> bool:
    return clock.spans is not None and clock.spans.watched


def _named(make: Callable[..., Any], *arguments: Any) -> Any:
    """Make a sample; name that where the data set names no steps of its own."""
    spans = clock.spans
    if spans is None or not spans.watched:
        return make(*arguments)
    before, started = len(spans.lines), time.monotonic_ns()
    sample = make(*arguments)
    if len(spans.lines) == before:
        spans.end(("sample", "other", started))
    return sample


_END = object()
