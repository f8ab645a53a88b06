"""Spans and memory samples as bytes, for the live view.

A record holds numbers only; names, details and rows (device, lane) are numbers of tables that
grow slowly and are sent once.  ``live.js`` reads the same layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from labutils.trace import KINDS, MemorySample, Span

SPAN = struct.Struct("<ddfHBxII")
"""start [s], end [s], bytes, row, kind, (padding), name, detail."""

SAMPLE = struct.Struct("<ddHxx")
"""time [s], allocated [B], row."""

MAX_TEXTS, MAX_TEXT, MAX_ROWS = 4096, 120, 512
"""Different texts, characters of a text, and rows that are told apart; the rest share one."""

_KIND_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


class Tables:
    """Numbers for texts and rows, in the order of their first use; text 0 is empty."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {"": 0}
        self.rows: dict[tuple[str, str], int] = {}

    def text(self, text: str) -> int:
        """The number of a text; 0 once the table is full."""
        text = text[:MAX_TEXT]
        number = self.texts.get(text)
        if number is None:
            if len(self.texts) == MAX_TEXTS:
                return 0
            number = self.texts[text] = len(self.texts)
        return number

    def row(self, device: str, lane: str = "") -> int:
        """The number of a device's lane (or, without a lane, of its memory)."""
        number = self.rows.get((device, lane))
        if number is None:
            number = min(len(self.rows), MAX_ROWS - 1)
            if number == len(self.rows):
                self.rows[device, lane] = number
        return number


def pack_spans(spans: Iterable[Span], tables: Tables) -> bytes:
    """One record per span."""
    pack, text, row, kind = SPAN.pack, tables.text, tables.row, _KIND_NUMBER
    return b"".join([
        pack(s.start, s.end, s.bytes, row(s.device, s.lane), kind[s.kind],
             text(s.name), text(s.detail))
        for s in spans
    ])  # fmt: skip


def pack_samples(samples: Iterable[MemorySample], tables: Tables) -> bytes:
    """One record per sample."""
    pack, row = SAMPLE.pack, tables.row
    return b"".join([pack(s.time, s.allocated, row(s.device)) for s in samples])


def unpack(spans: bytes, samples: bytes, tables: Tables) -> tuple[list[Span], list[MemorySample]]:
    """Spans and samples again (bytes to seven digits)."""
    texts, rows = list(tables.texts), list(tables.rows)
    unpacked = [
        Span(texts[name], start, end, rows[row][0], rows[row][1], KINDS[kind],
             int(size), texts[detail])
        for start, end, size, row, kind, name, detail in SPAN.iter_unpack(spans)
    ]  # fmt: skip
    return unpacked, [
        MemorySample(time, rows[row][0], int(allocated))
        for time, allocated, row in SAMPLE.iter_unpack(samples)
    ]


class Log:
    """The newest records, each with its number since the beginning."""

    def __init__(self, size: int, keep: int) -> None:
        self.size, self.keep = size, keep
        self.data = bytearray()
        self.first = 0

    @property
    def end(self) -> int:
        """The number that the next record will have."""
        return self.first + len(self.data) // self.size

    def append(self, records: bytes) -> None:
        """Add records, and forget the oldest beyond ``keep``."""
        self.data += records
        excess = len(self.data) // self.size - self.keep
        if excess > 0:
            del self.data[: excess * self.size]
            self.first += excess

    def since(self, number: int, most: int) -> tuple[int, bytes]:
        """Up to ``most`` records from ``number`` on (or the oldest kept) and the first's number."""
        start = min(max(number, self.first), self.end)
        offset = (start - self.first) * self.size
        return start, bytes(self.data[offset : offset + most * self.size])
