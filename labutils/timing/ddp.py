"""DistributedDataParallel's buckets: which parameters share one, and a recorded step with them.

Source of the algorithm: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size,
rebuild_buckets and finalize_backward; tests compare with PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..virtual.record import Collective, Entry, Kernel

MIB = 1 << 20
Group = list[int]


def assign(tensors: Sequence[torch.Tensor], limits: Sequence[int]) -> list[Group]:
    """Indices of ``tensors`` by bucket, in order.

    A bucket is full once it has reached its limit, so it may exceed it by most of one tensor.
    Element types have buckets of their own, and each type goes through ``limits`` (bytes), of
    which the last one stays.
    """
    full: list[Group] = []
    open_: dict[torch.dtype, tuple[Group, int]] = {}
    turn: dict[torch.dtype, int] = {}
    for index, tensor in enumerate(tensors):
        group, size = open_.pop(tensor.dtype, ([], 0))
        group.append(index)
        size += tensor.numel() * tensor.element_size()
        number = turn.get(tensor.dtype, 0)
        if size >= limits[min(number, len(limits) - 1)]:
            full.append(group)
            turn[tensor.dtype] = number + 1
        else:
            open_[tensor.dtype] = (group, size)
    return full + [group for group, _ in open_.values()]


def buckets(
    gradients: Sequence[torch.Tensor], cap_mb: float, first_mb: float, rebuilt: bool = True
) -> list[Group]:
    """The buckets of DDP in the order in which they are reduced; indices of ``gradients``.

    Args:
        gradients: in the order in which they become ready; in the reverse order of the parameters
            if not ``rebuilt``.
        cap_mb, first_mb: limits in MiB, of all buckets and of the first one that is filled.
        rebuilt: false where DDP keeps its first assignment (``find_unused_parameters``): that one
            is filled in the order of the parameters, and reduced from its end.
    """
    limits = [int(first_mb * MIB), int(cap_mb * MIB)]
    if rebuilt:
        return assign(gradients, limits)
    last = len(gradients) - 1
    found = sorted(assign(list(reversed(gradients)), limits), key=min)
    return [[last - index for index in group] for group in reversed(found)]


@dataclass
class _Parts:
    """A recorded pass with one bucket per parameter, taken apart."""

    issued: list[int]
    """Positions of the all-reduces, by bucket; the entry after each records its event."""
    waits: list[int]
    """Positions at which the stream waits for each of them."""
    ends: list[int]
    """Where the work on each bucket ends that follows its wait."""


def regroup(entries: list[Entry], groups: Sequence[Group]) -> list[Entry]:
    """The recorded pass of one bucket per parameter as it is with ``groups``.

    A bucket is reduced when its last gradient is ready and the buckets before it have been
    reduced.  At the end of backward the stream waits for one bucket after the other, and what was
    reduced is copied back into the gradients, unless these lie in the buckets.
    """
    parts = _take_apart(entries, sum(map(len, groups)))
    order = [index for group in groups for index in group]
    moved = {*parts.issued, *(p + 1 for p in parts.issued)}
    for wait, end in zip(parts.waits, parts.ends, strict=True):
        moved.update(range(wait, end))
    reduced = _reduced(entries, parts, groups)
    finish = min(parts.waits, default=len(entries))
    made: list[Entry] = []
    for position, entry in enumerate(entries):
        if position == finish:
            made += _finished(entries, parts, groups)
        made += reduced.get(position, [])
        if position not in moved:
            made.append(entry)
    assert sorted(order) == list(range(len(order)))
    return made


def spread(entries: list[Entry], world: int) -> list[Entry]:
    """The entries with their collectives over ``world`` ranks."""
    ranks = range(world)  # as large for a million ranks as for two
    return [
        e._replace(ref=e.ref._replace(devices=ranks)) if e.what == "collective" else e
        for e in entries
    ]


def _take_apart(entries: list[Entry], count: int) -> _Parts:
    issued = [
        position
        for position, entry in enumerate(entries)
        if isinstance(entry.ref, Collective) and entry.ref.op == "all_reduce"
    ][:count]
    events = {entries[position + 1].ref: n for n, position in enumerate(issued)}
    waits, ends = [len(entries)] * count, [len(entries)] * count
    for position, entry in enumerate(entries):
        if entry.what == "wait" and entry.ref in events:
            end = position + 1
            while end < len(entries) and _belongs(entries, end):
                end += 1
            waits[events[entry.ref]], ends[events[entry.ref]] = position, end
    return _Parts(issued, waits, ends)


def _belongs(entries: list[Entry], position: int) -> bool:
    """Whether the entry works on the bucket that was waited for, or is the change of memory that
    was noted with such work."""
    entry = entries[position]
    if entry.what == "memory":
        entry = entries[position - 1]
    return entry.kernel is not None and entry.kernel.name in ("as_strided", "view", "copy_")


def _reduced(
    entries: list[Entry], parts: _Parts, groups: Sequence[Group]
) -> dict[int, list[Entry]]:
    """What to insert where: one all-reduce per bucket, in order."""
    found: dict[int, list[Entry]] = {}
    position = 0
    for group in groups:
        position = max(position, *(parts.issued[index] for index in group))
        last = parts.issued[group[-1]]
        single = [entries[parts.issued[index]] for index in group]
        kernels = [e.kernel for e in single if e.kernel is not None]
        nbytes = sum(kernel.bytes_read for kernel in kernels)
        kernel: Kernel = kernels[-1]._replace(bytes_read=nbytes, bytes_written=nbytes)
        found.setdefault(position, []).extend(
            [entries[last]._replace(kernel=kernel, ref=single[0].ref), entries[last + 1]]
        )
    return found


def _finished(entries: list[Entry], parts: _Parts, groups: Sequence[Group]) -> list[Entry]:
    """Bucket by bucket: wait, views of the bucket, copies into gradients that are no views."""
    made: list[Entry] = []
    for group in groups:
        wait = parts.waits[group[-1]]
        if wait < len(entries):
            made.append(entries[wait])
        works = [e for index in group for e in entries[parts.waits[index] + 1 : parts.ends[index]]]
        kernels = [e for e in works if e.kernel is not None]
        kernels.sort(key=lambda e: e.kernel.name == "copy_")  # type: ignore[union-attr]
        made += [*kernels[:1], *(e for e in works if e.kernel is None), *kernels[1:]]
    return made


__all__ = ["assign", "buckets", "regroup", "spread"]
