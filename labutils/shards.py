"""Which sample goes to which rank: do the samplers of all ranks cover the data set as they should?

No process group is needed: a ``DistributedSampler`` can be told its rank and their number.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler, Sampler

if TYPE_CHECKING:
    from labutils.figures import TraceFigure

_FEW = 6  # indices that a summary names


@dataclass(frozen=True)
class Coverage:
    """What the ranks draw; made by :func:`coverage`."""

    orders: list[list[list[int]]]
    """``orders[epoch][rank]``: indices of the data set, in the order in which they are drawn."""
    size: int
    """Samples in the data set."""

    @property
    def ranks(self) -> int:
        return len(self.orders[0])

    @cached_property
    def counts(self) -> list[Counter[int]]:
        """How often each index is drawn in each epoch, by all ranks together."""
        return [Counter(i for order in orders for i in order) for orders in self.orders]

    @property
    def repeated(self) -> list[list[int]]:
        """Indices that are drawn more than once, per epoch."""
        return [sorted(i for i, times in counts.items() if times > 1) for counts in self.counts]

    @property
    def missing(self) -> list[list[int]]:
        """Indices that nobody draws, per epoch."""
        return [sorted(set(range(self.size)) - set(counts)) for counts in self.counts]

    @property
    def disjoint(self) -> bool:
        """Whether no index goes to two ranks (or twice to one) within an epoch."""
        return not any(self.repeated)

    @property
    def complete(self) -> bool:
        """Whether every index is drawn in every epoch."""
        return not any(self.missing)

    @property
    def even(self) -> bool:
        """Whether all ranks draw equally many, as DDP needs it."""
        return all(len({len(order) for order in orders}) == 1 for orders in self.orders)

    @property
    def padded(self) -> bool:
        """Whether what is repeated only fills the ranks up to equal numbers."""
        return self.even and self.complete and not self.disjoint and all(map(_filled, self.orders))

    @property
    def same_order(self) -> bool | None:
        """Whether all epochs are alike, in the same order; None if there is nothing to compare."""
        if len(self.orders) < 2 or not any(self.counts):
            return None
        return all(orders == self.orders[0] for orders in self.orders[1:])

    def summary(self) -> str:
        """A line for each question."""
        draws = [len(order) for order in self.orders[0]]
        each = f"{draws[0]}" if self.even else f"{min(draws)} to {max(draws)}"
        lines = [f"{self.size} samples, {self.ranks} ranks, {each} draws on each, in one epoch"]
        lines += [f"disjoint  {self._disjoint()}", f"complete  {self._complete()}"]
        if not self.even:
            lines.append("even      no: a rank that ends early leaves the others waiting in DDP")
        if self.same_order is not None:
            same = "all epochs have the same order: sampler.set_epoch(epoch) is missing, or shuffle"
            lines.append(f"reshuffled  {'no: ' + same if self.same_order else 'yes'}")
        return "\n".join(lines)

    def _disjoint(self) -> str:
        if self.disjoint:
            return "yes"
        number = sum(self.counts[0].values()) - len(self.counts[0])
        why = "padding, so that all draw equally many" if self.padded else "ranks share samples"
        return f"no: {number} draws repeat an index ({_some(self.repeated[0])}): {why}"

    def _complete(self) -> str:
        if self.complete:
            return "yes"
        epoch = next(e for e, missing in enumerate(self.missing) if missing)
        missing = self.missing[epoch]
        return f"no: {len(missing)} never drawn in epoch {epoch} ({_some(missing)})"

    def figure(self) -> TraceFigure:
        """A grid of ranks × indices for each epoch; repeated draws stand out."""
        from labutils.shard_figure import draw  # matplotlib is loaded only now

        return draw(self)

    def __repr__(self) -> str:
        return self.summary()


def _filled(orders: list[list[int]]) -> bool:
    """Whether without the last draw of the last few ranks nothing is drawn twice.

    That is how ``DistributedSampler`` fills up: its list of indices goes round the ranks, and the
    first of them are appended.
    """
    drawn = [index for order in orders for index in order]
    extra = len(drawn) - len(set(drawn))
    kept = [o[:-1] if rank >= len(orders) - extra else o for rank, o in enumerate(orders)]
    return 0 < extra < len(orders) and len(set().union(*kept)) == sum(map(len, kept))


def _some(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_FEW]))
    return shown + ", …" * (len(indices) > _FEW)


def coverage(
    samplers: Any,
    ranks: int | None = None,
    *,
    epochs: int = 2,
    set_epoch: bool = True,
    size: int | None = None,
) -> Coverage:
    """Draw from the samplers of all ranks, and see who gets what.

    Args:
        samplers: one of: a ``DistributedSampler``, or a batch sampler or DataLoader that draws from
            one (of any rank: the others are made from it); a
            function of the rank that returns a sampler; a list with the sampler of each rank.
            Batch samplers, DataLoaders and plain lists of indices are samplers here as well.
        ranks: how many there are; needed with a function, and with a sampler that does not know.
        epochs: how often to go through them.
        set_epoch: call ``set_epoch`` before each epoch, as a right training loop does; False shows
            what comes of forgetting it.
        size: samples in the data set; by default what the samplers know of it, else the largest
            index drawn.

    Raises:
        ValueError: the numbers make no sense, or a sampler draws something that is no index.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be a whole number of at least 1, not {epochs!r}.")
    each = _samplers(samplers, ranks)
    orders = []
    for epoch in range(epochs):
        for sampler in (s for one in each for s in nested(one)) if set_epoch else ():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        orders.append([_indices(sampler, rank) for rank, sampler in enumerate(each)])
    if size is None:
        size = next(filter(None, map(_size, nested(each[0]))), 0) or 1 + max(
            (i for o in orders for r in o for i in r), default=-1
        )
    outside = sorted({i for o in orders for r in o for i in r if not 0 <= i < size})
    if outside:
        raise ValueError(f"the samplers draw {_some(outside)}, but there are {size} samples.")
    return Coverage(orders, size)


def _samplers(given: Any, ranks: int | None) -> list[Any]:
    """One per rank."""
    if isinstance(given, DataLoader):
        given = _of_loader(given)
    if isinstance(given, Sampler):
        given = _of_all_ranks(given, ranks)
    elif callable(given):
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(
                f"with a function of the rank, ranks must say how many there are, not {ranks!r}."
            )
        given = [given(rank) for rank in range(ranks)]
    given = list(given) if isinstance(given, Iterable) else []
    if not given or not all(isinstance(sampler, Iterable) for sampler in given):
        raise ValueError(
            "coverage needs a DistributedSampler, a function of the rank, or a list with one "
            "sampler for each rank."
        )
    if ranks not in (None, len(given)):
        raise ValueError(f"there are samplers for {len(given)} ranks, not for {ranks}.")
    return [
        _of_loader(sampler) if isinstance(sampler, DataLoader) else sampler for sampler in given
    ]


def _of_loader(loader: DataLoader[Any]) -> Any:
    """What a DataLoader draws from: its batches, since it may drop the last one."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def nested(sampler: Any) -> list[Any]:
    """A sampler (or DataLoader) and those that it draws from, from the outermost inwards."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        one = waiting.pop(0)
        if one is not None and not any(one is other for other in found):
            found.append(one)
            waiting += [getattr(one, "sampler", None), getattr(one, "batch_sampler", None)]
    return found


def _of_all_ranks(sampler: Any, ranks: int | None) -> list[Any]:
    inner = next((s for s in nested(sampler) if isinstance(s, DistributedSampler)), None)
    if inner is not None:
        return [_of_rank(sampler, rank) for rank in range(inner.num_replicas)]
    if ranks is None:
        raise ValueError(
            f"nothing in this {type(nested(sampler)[-1]).__name__} is seen to depend on the rank, "
            "so every rank would read everything: use a DistributedSampler, give a function of the "
            "rank that returns a sampler, or say how many ranks= there are, to see what they share."
        )
    return [sampler] * ranks


def _of_rank(sampler: Any, rank: int) -> Any:
    """The same on another rank; batch samplers are copied with what they draw from."""
    other = copy.copy(sampler)
    if isinstance(sampler, DistributedSampler):
        other.rank = rank
    else:
        other.sampler = _of_rank(sampler.sampler, rank)
    return other


def _indices(sampler: Any, rank: int) -> list[int]:
    """All that a sampler draws in one epoch; batches are laid end to end."""
    drawn: list[int] = []
    for item in sampler:
        for index in item if isinstance(item, list | tuple) else [item]:
            try:
                drawn.append(index.__index__())
            except (AttributeError, TypeError):
                raise ValueError(
                    f"the sampler of rank {rank} draws {index!r}, which is no index."
                ) from None
    return drawn


def _size(sampler: Any) -> int:
    """Samples in the data set behind a sampler, 0 if it does not know."""
    for name in ("dataset", "data_source"):
        if hasattr(getattr(sampler, name, None), "__len__"):
            return len(getattr(sampler, name))
    return 0
