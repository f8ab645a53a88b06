"""Recordings for any batch size from two: all sizes of a step are straight lines in the batch.

Shapes, floating-point operations and bytes of an operation grow by the same amount with every
sample.  Two recordings that differ by one sample therefore give all others exactly, as long as the
program does the same operations; a model that looks at its batch size is recorded again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..virtual.record import Entry, Kernel
from . import library
from .recording import Recording, Setting

SMALL, LARGE = 2, 3
"""Samples of the two recordings; one alone is special (batch norm refuses it)."""


def recording(
    source: library.Source, setting: Setting, record: library.Recorder = library.recording
) -> Recording:
    """As ``library.recording``, at once for every batch size after the first two.

    ``record`` makes these two.
    """
    if setting.strategy == "dp" or setting.batch < SMALL:
        return record(source, setting)
    return library.remember(source, ("scaled", setting), lambda: _make(source, setting, record))


def _make(source: library.Source, setting: Setting, record: library.Recorder) -> Recording:
    small, large = (record(source, replace(setting, batch=n)) for n in (SMALL, LARGE))
    made = extend(small, large, setting.batch)
    return record(source, setting) if made is None else made


def extend(small: Recording, large: Recording, batch: int) -> Recording | None:
    """The recording at ``batch`` from those at ``SMALL`` and ``LARGE``; None if they differ in
    more than sizes."""
    line = _Line(batch - SMALL)
    try:
        parts = [
            line.entries(one, other)
            for one, other in zip(
                (*small.micro, small.last), (*large.micro, large.last), strict=True
            )
        ]
        allocated = line.between(small.allocated, large.allocated)
    except ValueError:
        return None
    return replace(
        small, micro=tuple(parts[:-1]), last=parts[-1], allocated=allocated, before=0,
        samples=batch,
    )  # fmt: skip


class _Line:
    """Extends pairs of sizes by ``steps`` beyond the first."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.kernels: dict[tuple[int, int], Kernel] = {}

    def entries(self, one: list[Entry], other: list[Entry]) -> list[Entry]:
        return [self.entry(a, b) for a, b in zip(one, other, strict=True)]

    def entry(self, a: Entry, b: Entry) -> Entry:
        if a[:5] != b[:5]:
            raise ValueError
        if a.kernel is not None and b.kernel is not None:
            key = id(a.kernel), id(b.kernel)
            if key not in self.kernels:
                self.kernels[key] = self.kernel(a.kernel, b.kernel)
            return a._replace(kernel=self.kernels[key])
        return a._replace(ref=self.between(a.ref, b.ref)) if a.what == "memory" else a

    def kernel(self, a: Kernel, b: Kernel) -> Kernel:
        if (a.name, a.kind, a.dtype) != (b.name, b.kind, b.dtype):
            raise ValueError
        return Kernel(*(self.between(one, other) for one, other in zip(a, b, strict=True)))

    def between(self, one: Any, other: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(self.between(a, b) for a, b in zip(one, other, strict=True))
        return one + (other - one) * self.steps if isinstance(one, int) else one


__all__ = ["extend", "recording"]
