"""A few pages of memory shared by the ranks of one run and the notebook that started them.

Each rank has a part that only it writes: how far it has come, its last collective, and the calls
that it is about to make (two per process group, which is enough: nobody posts call n + 2 before
everybody has read call n).  Readers take no lock; an entry is valid when its key is unchanged and
its checksum fits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from labutils.guard import alive

GROUPS = 32
"""Process groups whose calls can be compared (by number of creation)."""

RUNNING, FINISHED, ABSENT, FAILED = 1, 2, 3, 4
"""States of a rank: running its function, finished it, not taking part in this cell, failed."""

_LEFT_OVER_S = 60  # a folder that is younger may belong to a container with other process numbers
_ENTRY = 512
_KEY = struct.Struct("<QIHxx")  # key, checksum, length
_NUMBER, _CHECK = struct.Struct("<Q"), struct.Struct("<IH")
_ROOM = _ENTRY - _KEY.size
_STATE = struct.Struct("<QQQ")  # state, progress, time of the last progress in ns
_LAST = 64  # where the last call's entry begins, after the state
_CALLS = _LAST + _ENTRY
_RANK = _CALLS + GROUPS * 2 * _ENTRY


class Last(NamedTuple):
    """The last collective (or send, or receive) of a rank."""

    text: str
    """E.g. ``all_reduce #4 of float32 (4,), sum``."""
    where: str
    """``file, line n`` of the user's call."""
    since: int
    """When it was called, in ns of ``time.monotonic_ns``."""
    state: str
    """"waiting" for it, "issued" (asynchronous, not known to be complete) or "done"."""
    buckets: int = 0
    """For a call of DDP's reducer: whose it is, the same number on all ranks that meet in it."""


class Board:
    """The shared pages, as one process sees them.  ``rank`` is the part that it writes."""

    def __init__(self, path: str, rank: int = -1) -> None:
        self.path, self.rank = path, rank
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.ranks = len(self._map) // _RANK
        self._base = rank * _RANK
        self._progress = 0

    @staticmethod
    def create(path: str, ranks: int) -> Board:
        """A fresh board for ``ranks`` ranks; raises OSError when there is no room for it."""
        with open(path, "wb") as file:
            if hasattr(os, "posix_fallocate"):  # a sparse file on a full disk would be a bus error
                os.posix_fallocate(file.fileno(), 0, ranks * _RANK)
            else:
                file.write(bytes(ranks * _RANK))
        return Board(path)

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()

    def set_state(self, state: int, rank: int | None = None) -> None:
        """Say what ``rank`` (by default this process's) is doing."""
        base = self._base if rank is None else rank * _RANK
        _NUMBER.pack_into(self._map, base, state)

    def state(self, rank: int) -> int:
        return int(_STATE.unpack_from(self._map, rank * _RANK)[0])

    def advance(self) -> None:
        """Something went forward in this rank."""
        self._progress += 1
        struct.pack_into("<QQ", self._map, self._base + 8, self._progress, time.monotonic_ns())

    def advanced(self, rank: int) -> int:
        """When ``rank`` last went forward (``time.monotonic_ns``), 0 if never."""
        return int(_STATE.unpack_from(self._map, rank * _RANK)[2])

    def set_last(self, last: Last) -> None:
        """Note this rank's last call."""
        text = f"{last.text}\0{last.where}\0{last.since}\0{last.state}\0{last.buckets}"
        self._write(self._base + _LAST, last.since | 1, text.encode())

    def last(self, rank: int) -> Last | None:
        """The last call of ``rank``; None if there is none."""
        for _ in range(3):  # it may be writing just now
            data = self._read(rank * _RANK + _LAST)
            if data is not None:
                parts = data[1].decode(errors="replace").split("\0")
                if len(parts) == 5:
                    return Last(parts[0], parts[1], int(parts[2]), parts[3], int(parts[4]))
        return None

    def forget(self, rank: int) -> None:
        """Clear what ``rank`` said (between two cells)."""
        start = rank * _RANK
        self._map[start : start + _LAST + _KEY.size] = bytes(_LAST + _KEY.size)

    def post(self, group: int, key: int, payload: bytes) -> None:
        """Say which call number ``key`` of ``group`` this rank is about to make."""
        self._write(self._base + _call_offset(group, key), key, payload)

    def posted(self, rank: int, group: int, key: int) -> bytes | None:
        """What ``rank`` posted under ``key``; None if it has not yet."""
        data = self._read(rank * _RANK + _call_offset(group, key), key)
        return None if data is None else data[1]

    def _write(self, offset: int, key: int, payload: bytes) -> None:
        payload = payload[:_ROOM]
        body = offset + _KEY.size
        _NUMBER.pack_into(self._map, offset, 0)
        self._map[body : body + len(payload)] = payload
        _CHECK.pack_into(self._map, offset + _NUMBER.size, zlib.crc32(payload), len(payload))
        _NUMBER.pack_into(self._map, offset, key)  # last: from now on the entry counts

    def _read(self, offset: int, key: int | None = None) -> tuple[int, bytes] | None:
        found, checksum, length = _KEY.unpack_from(self._map, offset)
        if found == 0 or (key is not None and found != key):
            return None
        body = offset + _KEY.size
        payload = bytes(self._map[body : body + length])
        unchanged = _NUMBER.unpack_from(self._map, offset)[0] == found
        return (found, payload) if unchanged and zlib.crc32(payload) == checksum else None


def _call_offset(group: int, key: int) -> int:
    return _CALLS + (2 * group + key % 2) * _ENTRY


def folder() -> str:
    """Where boards and sockets live: memory where the system offers it, else the usual place."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK) else ""


def own_folder() -> Path:
    """A fresh folder there.  Those of processes that were killed at a bad moment are removed."""
    place = Path(folder() or tempfile.gettempdir())
    for left in place.glob("labutils-ranks-*"):
        with contextlib.suppress(OSError, ValueError):
            owner, age = int(left.name.split("-")[2]), time.time() - left.stat().st_mtime
            if age > _LEFT_OVER_S and not alive(owner):
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"labutils-ranks-{os.getpid()}-", dir=place))
