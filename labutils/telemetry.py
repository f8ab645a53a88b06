"""Measuring inside a rank: spans, collectives and memory, into files that survive a crash.

A run has a directory; each rank appends lines of JSON to a file of its own there, one ``write`` per
line, so that what was written is there even if the process is killed the moment after.  A live view
follows the files while the run goes on, and :func:`merge` makes one :class:`Trace` of them.

Times are the host's monotonic clock.  Spans of a CUDA device are timed by events on its stream,
which are looked up once the device has passed them: nothing waits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from labutils.clocks import CudaClock, HostClock
from labutils.trace import KINDS, rank_rows

SAMPLE_S = 0.2
"""Shortest time between two memory samples taken in the background."""


class Sink(Protocol):
    """Something that wants to know of spans: a recorder of a rank, or a watch in the kernel."""

    def begin(self, name: str, kind: str) -> Any:
        """A span begins; returns what :meth:`end` is to be given."""

    def end(self, token: Any) -> None:
        """That span ends."""


_KINDS = frozenset(KINDS)
_sinks: list[Sink] = []
_recorder: Recorder | None = None


def add_sink(sink: Sink) -> None:
    """Tell ``sink`` of every span from now on."""
    _sinks.append(sink)


def remove_sink(sink: Sink) -> None:
    """Stop telling ``sink``; it need not be known."""
    with contextlib.suppress(ValueError):
        _sinks.remove(sink)


@contextlib.contextmanager
def span(name: str, kind: str | None = None) -> Iterator[None]:
    """Name a stretch of work: ``with lab.span("forward"): ...``, in the notebook and in ranks.

    ``kind`` is one of ``labutils.trace.KINDS`` and decides the colour; by default it is the name
    itself where that is a kind, else "span".  On a GPU the span lasts until the GPU has done the
    work that was issued in it.
    """
    if kind is None:
        kind = name if name in _KINDS else "span"
    elif kind not in _KINDS:
        raise ValueError(f"span {name!r} has kind {kind!r}; known kinds are {', '.join(KINDS)}.")
    open_spans = [(sink, sink.begin(name, kind)) for sink in _sinks]
    try:
        yield
    finally:
        for sink, token in reversed(open_spans):
            sink.end(token)


def mark() -> Any:
    """This moment, on the clock of the rank's device; for :func:`record`."""
    return time.monotonic_ns() if _recorder is None else _recorder.clock.mark()


def record(
    name: str, kind: str, start: Any, lane: str = "compute", nbytes: int = 0, detail: str = ""
) -> None:
    """Record what began at ``start`` (a :func:`mark`) and ends now; nothing without a recorder."""
    if _recorder is not None:
        _recorder.add(name, kind, lane, start, _recorder.clock.mark(), nbytes, detail)


def start(
    path: str, rank: int, device: torch.device, offset_ns: int = 0, error_ns: int = 0
) -> None:
    """Record this process's spans, calls and memory into the file ``path`` from now on.

    ``offset_ns`` is to be added to this host's clock to get the notebook's, which is known to
    within ``error_ns`` nanoseconds.
    """
    global _recorder
    if _recorder is not None and _recorder.path == path:
        return
    stop()
    _recorder = Recorder(path, rank, device, offset_ns, error_ns)
    add_sink(_recorder)


def rest() -> None:
    """Between two runs: write what there is, and take no samples until :func:`resume`."""
    if _recorder is not None:
        _recorder.flush()
        _recorder.active.clear()


def resume() -> None:
    """Take samples again."""
    if _recorder is not None:
        _recorder.active.set()


def stop() -> None:
    """Write what is left and close the file; the end of recording in this process."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        remove_sink(recorder)
        recorder.close()


def move(device: torch.device) -> None:
    """From now on this process's work and memory are those of ``device``."""
    if _recorder is not None:
        _recorder.introduce(device)


@functools.lru_cache(maxsize=1000)
def rest_of_line(name: str, kind: str, lane: str, nbytes: int, detail: str) -> str:
    """What follows the two times in a span's line: the same, step after step."""
    return json.dumps((name, kind, lane, nbytes, detail), separators=(",", ":"))[1:] + "\n"


class Recorder:
    """Writes one rank's file.  A full disk loses lines (they are counted), never a run."""

    def __init__(
        self, path: str, rank: int, device: torch.device, offset_ns: int, error_ns: int
    ) -> None:
        self.path, self.rank, self.dropped = path, rank, 0
        self._offset_ns, self._error_ns = offset_ns, error_ns
        self._pending: deque[tuple[Any, ...]] = deque()
        self._lock = threading.Lock()
        self._sampled = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            self._fd = -1
        self.introduce(device)
        self.active = threading.Event()
        self.active.set()
        self._closing = False
        self._thread = threading.Thread(target=self._sample_for_ever, name="telemetry", daemon=True)
        self._thread.start()

    def introduce(self, device: torch.device) -> None:
        """Say whose file this is; what follows is about ``device``."""
        self.device = device
        self._began, self._peak = time.monotonic_ns(), peak_of(device)
        self.clock: HostClock = CudaClock() if device.type == "cuda" else HostClock()
        self._write({
            "rank": self.rank, "device": row_of(self.rank, device), "pid": os.getpid(),
            "hardware": hardware_of(device), "offset_ns": self._offset_ns,
            "error_ns": self._error_ns, "capacity": _capacity(device),
        })  # fmt: skip

    def begin(self, name: str, kind: str) -> Any:
        return name, kind, self.clock.mark()

    def end(self, token: Any) -> None:
        name, kind, begun = token
        self.add(name, kind, "compute", begun, self.clock.mark(), 0, "")

    def add(
        self, name: str, kind: str, lane: str, begun: Any, ended: Any, nbytes: int, detail: str
    ) -> None:
        """Write a span, once the device has passed its end."""
        if self.device.type != "cpu" and time.monotonic_ns() - self._sampled > 2_000_000:
            self.sample()
        if self.device.type != "cuda":
            self._span(name, kind, lane, begun, ended, nbytes, detail)
        else:
            self._pending.append((name, kind, lane, begun, ended, nbytes, detail))
            self.flush()

    def flush(self) -> None:
        """Write the spans whose end the device has passed by now."""
        with self._lock:
            while self._pending and self.clock.passed(self._pending[0][4]):
                self._span(*self._pending.popleft())

    def sample(self) -> None:
        """Write how much memory the rank holds now."""
        before, device = self._sampled, self.device
        self._sampled = now = time.monotonic_ns()
        held, peak = memory_of(device), peak_of(device)
        if device != self.device:  # it has moved to another device meanwhile
            return
        if peak > max(self._peak, held):  # between two samples; nobody knows when exactly
            self._write([(max(before, self._began) + now) // 2, peak])
        self._peak = max(self._peak, peak, held)
        self._write([now, held])

    def close(self) -> None:
        self._closing = True
        self.active.set()
        self.sample()
        if self.device.type == "cuda" and self._pending:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
        self.flush()
        if self.dropped:
            self._write({"dropped": self.dropped})
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _span(
        self, name: str, kind: str, lane: str, begun: Any, ended: Any, nbytes: int, detail: str
    ) -> None:
        first, last = self.clock.nanoseconds(begun), self.clock.nanoseconds(ended)
        rest = rest_of_line(name, kind, lane, nbytes, detail)
        self._append(f"[{first},{max(first, last)},{rest}")

    def _write(self, line: Any) -> None:
        self._append(json.dumps(line, separators=(",", ":")) + "\n")

    def _append(self, text: str) -> None:
        try:
            os.write(self._fd, text.encode())
        except OSError:
            self.dropped += 1

    def _sample_for_ever(self) -> None:
        while self.active.wait() and not self._closing:
            before = time.monotonic()
            self.flush()
            self.sample()
            time.sleep(max(SAMPLE_S, 300 * (time.monotonic() - before)))


def row_of(rank: int, device: torch.device) -> str:
    """The row of a rank in figures: its GPU, or the rank itself where it computes on the CPU."""
    return rank_rows(rank)[device.type != "cpu"]


def hardware_of(device: torch.device) -> str:
    """What is measured, in words."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return "CPU processes" if device.type == "cpu" else "virtual GPUs, measured on the CPU"


def memory_of(device: torch.device) -> int:
    """Bytes that this process holds: on its GPU, real or virtual, or alone on the CPU (USS)."""
    if device.type == "cpu":
        return _unique_memory()
    module = getattr(torch, device.type)
    return int(module.memory_allocated(device))


def peak_of(device: torch.device) -> int:
    """The most bytes that this process's GPU, real or virtual, has held so far; 0 on the CPU."""
    if device.type == "cpu":
        return 0
    return int(getattr(torch, device.type).max_memory_allocated(device))


def _unique_memory() -> int:
    try:
        with open("/proc/self/smaps_rollup") as file:
            rows = [line.split() for line in file if line.startswith("Private_")]
        return 1024 * sum(int(row[1]) for row in rows)
    except OSError:  # not Linux
        import psutil

        with contextlib.suppress(psutil.Error):
            return int(psutil.Process().memory_full_info().uss)
        return 0


def _capacity(device: torch.device) -> int:
    with contextlib.suppress(Exception):
        if device.type != "cpu":
            properties = getattr(torch, device.type).get_device_properties(device)
            return int(properties.total_memory)
    return 0
