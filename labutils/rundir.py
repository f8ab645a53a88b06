"""The directory of a run: what its ranks wrote, followed while it grows and merged into a Trace."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils.trace import MemorySample, Span, Trace

KEPT = 20
"""How many old run directories are kept."""

_OLD_S = 3600.0  # a younger directory may belong to a run of another notebook


def create(title: str) -> str:
    """A fresh directory for a run, private to the user; "" where there is no room for one."""
    try:
        top = Path(os.environ.get("LABUTILS_RUNS") or Path(tempfile.gettempdir()) / _name())
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        if top.stat().st_uid != getattr(os, "getuid", lambda: top.stat().st_uid)():
            return ""  # somebody else's
        _prune(top)
        path = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=top))
        (path / "run.json").write_text(
            json.dumps({"title": title, "start_ns": time.monotonic_ns(), "created": time.time()})
        )
        return str(path)
    except OSError:
        return ""


def _name() -> str:
    try:
        return f"labutils-{getpass.getuser()}"
    except (KeyError, OSError):  # a user id without a name, as containers have
        return f"labutils-{os.getuid()}"


def _prune(top: Path) -> None:
    runs = sorted((path for path in top.iterdir() if path.is_dir()), key=lambda path: path.name)
    for path in runs[: -KEPT or None]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_S:
                shutil.rmtree(path, ignore_errors=True)


def rank_file(directory: str, rank: int) -> str:
    """Where ``rank`` writes."""
    return str(Path(directory) / f"rank-{rank}.jsonl")


def merge(directory: str, start_ns: int = 0) -> Trace:
    """The measured Trace of a run, also of one that goes on or that crashed.

    ``start_ns`` (``time.monotonic_ns``) is its time zero, by default when the directory was made;
    what ended before is left out.
    """
    follower = Follower(directory, start_ns)
    follower.poll()
    return follower.trace


@dataclass
class _File:
    path: Path
    position: int = 0
    rest: bytes = b""
    header: dict[str, Any] = field(default_factory=dict)


class Follower:
    """Reads what has been added to a run's files; clocks are brought onto the notebook's.

    Where the clocks of two hosts differ by no more than the uncertainty of the measurement they are
    taken to be one clock; otherwise the trace says how uncertain the order of its ranks is.
    """

    def __init__(self, directory: str, start_ns: int = 0) -> None:
        self.trace = Trace("measured", "")
        self._directory = Path(directory)
        self._files: dict[Path, _File] = {}
        self._start_ns = 0
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = json.loads((self._directory / "run.json").read_text())
            self.trace.title, self._start_ns = facts["title"], start_ns or facts["start_ns"]

    def poll(self) -> tuple[list[Span], list[MemorySample]]:
        """What is new since the last call; it is in :attr:`trace` as well."""
        spans: list[Span] = []
        memory: list[MemorySample] = []
        for path in sorted(self._directory.glob("rank-*.jsonl")):
            file = self._files.setdefault(path, _File(path))
            for line in _new_lines(file):
                self._take(file, line, spans, memory)
        self.trace.spans += spans
        self.trace.memory += memory
        return spans, memory

    @property
    def now(self) -> float:
        """Seconds since the run's start."""
        return (time.monotonic_ns() - self._start_ns) * 1e-9

    def _take(self, file: _File, line: Any, spans: list[Span], memory: list[MemorySample]) -> None:
        if isinstance(line, dict):
            self._facts(file, line)
            return
        device = file.header.get("device", file.path.stem)
        if len(line) == 2 and self._seconds(file, line[0]) >= 0:
            memory.append(MemorySample(self._seconds(file, line[0]), device, line[1]))
        elif len(line) == 7 and self._seconds(file, line[1]) >= 0:
            first, last, name, kind, lane, nbytes, detail = line
            begin = max(0.0, self._seconds(file, first))
            spans.append(
                Span(name, begin, self._seconds(file, last), device, lane, kind, nbytes, detail)
            )

    def _facts(self, file: _File, facts: dict[str, Any]) -> None:
        self.trace.dropped += facts.get("dropped", 0)
        if "device" not in facts:
            return
        file.header = facts
        self.trace.hardware = facts["hardware"]
        if facts["capacity"]:
            self.trace.capacity[facts["device"]] = facts["capacity"]
        if abs(facts["offset_ns"]) > facts["error_ns"]:
            self.trace.notes.append(
                f"the clock of rank {facts['rank']} was moved by {facts['offset_ns'] // 1000} µs, "
                f"uncertain to {facts['error_ns'] // 1000} µs"
            )

    def _seconds(self, file: _File, moment_ns: int) -> float:
        offset, error = file.header.get("offset_ns", 0), file.header.get("error_ns", 0)
        if abs(offset) <= error:
            offset = 0
        return float(moment_ns + offset - self._start_ns) * 1e-9


def clock_offset(exchanges: list[tuple[int, int, int]]) -> tuple[int, int]:
    """Offset of another host's clock, and its uncertainty, both in the unit of the times given.

    Each exchange is (sent, their time, received), sent and received on this host's clock.  The
    fastest one is the best: their time was read somewhere between its two ends, so the offset to
    add to their clock is the middle minus their time, uncertain by half the round trip
    (F. Cristian, "Probabilistic clock synchronization", 1989).
    """
    if not exchanges:
        raise ValueError("clock_offset needs at least one exchange of times.")
    sent, theirs, received = min(exchanges, key=lambda times: times[2] - times[0])
    return (sent + received) // 2 - theirs, (received - sent + 1) // 2


def _new_lines(file: _File) -> list[Any]:
    try:
        with open(file.path, "rb") as stream:
            stream.seek(file.position)
            data = stream.read()
    except OSError:
        return []
    file.position += len(data)
    *whole, file.rest = (file.rest + data).split(b"\n")
    lines = []
    for text in whole:
        with contextlib.suppress(ValueError):  # a torn line of a rank that was killed
            lines.append(json.loads(text))
    return lines
