"""Seeing which samples a rank reads: DataLoaders, their samplers, and what they deliver."""

from __future__ import annotations

import contextlib
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from labutils.inspection.facts import Facts, where, wrap
from labutils.shards import nested

_MOST = 20_000
"""Samples of one epoch that are kept; more tell nothing new."""
_ROW_BYTES, _LEAVES, _PASSES = 2048, 4, 8


class DataObserver:
    """Writes down each pass over a DataLoader."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.first = WeakIdKeyDictionary()  # data sets need not be hashable, or equal to anything
        """The first loader of a sampler, and of a data set by its line and kinds of samplers."""
        self.told: dict[int, str] = {}
        """The epoch that ``set_epoch`` was last given, by the id of the sampler."""
        self.heard: set[type] = set()
        self.opening: Pass | None = None
        self.current: Pass | None = None
        """The pass that delivered a batch last: a training step belongs to it."""

    def install(self) -> None:
        """Watch from now on, in this process."""
        self._listen(DistributedSampler)  # at once: it may be told before its loader is made
        wrap(DataLoader, "__init__", self._made)
        wrap(DataLoader, "__iter__", self._begun)
        wrap(_BaseDataLoaderIter, "_next_index", self._drawn)
        wrap(_BaseDataLoaderIter, "__next__", self._delivered)

    def _made(self, original: Callable[..., Any], loader: Any, *args: Any, **more: Any) -> None:
        original(loader, *args, **more)
        self.introduce(loader)

    def _begun(self, original: Callable[..., Any], loader: Any) -> Any:
        self.opening = Pass(self, loader)
        try:
            iterator = original(loader)  # workers draw their first indices at once
        finally:
            observed, self.opening = self.opening, None
        iterator._observed = observed
        return iterator

    def _drawn(self, original: Callable[..., Any], iterator: Any) -> Any:
        indices = original(iterator)
        observed = self.opening or getattr(iterator, "_observed", None)
        if observed is not None:
            observed.drew(indices)
        return indices

    def _delivered(self, original: Callable[..., Any], iterator: Any) -> Any:
        start = time.perf_counter()
        batch = original(iterator)
        self.facts.data["waited_s"] += time.perf_counter() - start
        if (observed := getattr(iterator, "_observed", None)) is not None:
            observed.delivered(batch)
            self.current = observed
        return batch

    def introduce(self, loader: Any) -> None:
        """Write down how a loader was made."""
        self.loaders[loader] = len(self.facts.data["loaders"])
        sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        inner = nested(loader)[1:]
        for kind in {type(s) for s in inner if hasattr(s, "set_epoch")} - self.heard:
            self._listen(kind)
        place = where()
        self.facts.add(
            "loaders", where=place, like=self._like(loader, place), sampler=type(sampler).__name__,
            replicas=getattr(sampler, "num_replicas", None), rank=getattr(sampler, "rank", None),
            shuffle=getattr(sampler, "shuffle", None), size=_length(loader.dataset),
            batches=_length(loader), batch_size=loader.batch_size,
            set_epoch=any(hasattr(s, "set_epoch") for s in inner),
            seed=getattr(sampler, "seed", None), subset=_subset(loader.dataset),
            plain=_reads_everything(sampler) and type(loader.batch_sampler) is BatchSampler,
            replacement=any(bool(getattr(s, "replacement", False)) for s in inner),
        )  # fmt: skip

    def _listen(self, kind: type) -> None:
        self.heard.add(kind)
        wrap(kind, "set_epoch", self._told)

    def _like(self, loader: Any, place: str) -> int:
        """The first loader that this one is like: many scripts make one for each epoch.

        That has the same sampler, or was made by the same line for the same data set.
        """
        own = len(self.facts.data["loaders"])
        found = [own]
        samplers = nested(loader)[1:]
        kinds = [(type(s).__name__, getattr(s, "shuffle", None)) for s in samplers]
        owners = [(s, "") for s in samplers if hasattr(s, "set_epoch")]
        for owner, key in [*owners, (loader.dataset, f"{place} {kinds}")]:
            with contextlib.suppress(TypeError):  # a list, say, cannot be referred to weakly
                found.append(self.first.setdefault(owner, {}).setdefault(key, own))
        return min(found)

    def _told(self, original: Callable[..., Any], sampler: Any, *args: Any, **more: Any) -> Any:
        self.told[id(sampler)] = repr([*args, *more.values()])
        return original(sampler, *args, **more)

    def epoch_of(self, loader: Any) -> list[str]:
        """What ``set_epoch`` was last given, for the samplers of a loader that heard of it."""
        return [self.told[id(s)] for s in nested(loader)[1:] if id(s) in self.told]


class Pass:
    """One pass over a loader."""

    def __init__(self, observer: DataObserver, loader: Any) -> None:
        self.dataset = loader.dataset
        self.pending: deque[list[Any]] = deque()
        if loader not in observer.loaders:
            observer.introduce(loader)
        number = observer.facts.data["loaders"][observer.loaders[loader]]["like"]
        self.fact: dict[str, Any] = {
            "loader": number, "where": where(), "indices": [], "rows": [], "steps": 0,
            "told": observer.epoch_of(loader),
        }  # fmt: skip
        earlier = [e for e in observer.facts.data["epochs"] if e["loader"] == number]
        self.kept = len(earlier) < _PASSES
        if self.kept:
            observer.facts.add("epochs", **self.fact)
            self.fact = observer.facts.data["epochs"][-1]

    def drew(self, indices: Any) -> None:
        """The sampler has given a batch of indices (None from an IterableDataset)."""
        self.pending.append(list(indices) if isinstance(indices, list | tuple) else [indices])

    def delivered(self, batch: Any) -> None:
        """That batch has arrived; batches arrive in the order in which they were drawn."""
        indices = self.pending.popleft() if self.pending else []
        if not self.kept or len(self.fact["indices"]) > _MOST:
            return
        rows = _rows(batch, None if None in indices else len(indices))
        for position in range(max(len(rows), len(indices))):
            index = indices[position] if position < len(indices) else None
            self.fact["indices"].append(_resolve(self.dataset, index))
            self.fact["rows"].append(rows[position] if position < len(rows) else [])


def _reads_everything(sampler: Any) -> bool:
    """Whether it is one of PyTorch's that draw each index of the data set once."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples >= _length(sampler.data_source)
    return type(sampler) is SequentialSampler


def _subset(dataset: Any) -> dict[str, Any] | None:
    """Which part of a data set a ``Subset`` is: a checksum of its indices, and the first."""
    if not isinstance(dataset, Subset):
        return None
    indices = [_resolve(dataset, position) for position in range(min(len(dataset), _MOST))]
    return {"checksum": zlib.crc32(repr(indices).encode()), "first": indices[:5]}


def _length(sized: Any) -> int:
    """-1 where there is none."""
    try:
        return len(sized)
    except Exception:
        return -1


def _resolve(dataset: Dataset[Any], index: Any) -> int | None:
    """The index in the data set at the bottom of subsets."""
    try:
        while isinstance(dataset, Subset):
            index, dataset = dataset.indices[index], dataset.dataset
        return int(index)
    except (TypeError, ValueError, IndexError):
        return None


def _rows(batch: Any, size: int | None) -> list[list[int]]:
    """For each sample of a batch, a checksum of its part of each tensor."""
    leaves = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()][:_LEAVES]
    if not leaves or any(t.device.type != "cpu" for t in leaves):
        return []
    length = len(leaves[0]) if size is None else size
    leaves = [t for t in leaves if len(t) == length]
    return [[_row(leaf[position]) for leaf in leaves] for position in range(length)]


def _row(value: torch.Tensor) -> int:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat[:_ROW_BYTES].numpy().tobytes())
