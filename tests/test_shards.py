"""Who draws which sample: found out of samplers whose indices are known beforehand."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from labutils.shards import Coverage, coverage


def test_distributed_sampler_that_divides() -> None:
    found = coverage(DistributedSampler(range(12), 3, 1, shuffle=False), epochs=1)
    assert found.orders == [[[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]]
    assert (found.disjoint, found.complete, found.even, found.padded) == (True, True, True, False)
    assert found.same_order is None
    assert found.summary() == (
        "12 samples, 3 ranks, 4 draws on each, in one epoch\ndisjoint  yes\ncomplete  yes"
    )


def test_padding_is_told_from_sharing() -> None:
    """10 samples on 4 ranks: 12 draws, and the first two come again at the end."""
    found = coverage(DistributedSampler(range(10), 4, 0, shuffle=False))
    assert found.repeated == [[0, 1], [0, 1]]
    assert found.padded
    assert not found.disjoint
    assert "2 draws repeat an index (0, 1): padding" in found.summary()
    shared = coverage([[0, 1, 2], [2, 3, 4]], size=5)
    assert not shared.padded
    assert "ranks share samples" in coverage([[0, 1], [1, 2]]).summary()
    for size in range(1, 30):
        assert coverage(DistributedSampler(range(size), 8, 0)).padded == (size % 8 > 0)
    assert not coverage([[0, 1], [0, 1]]).padded
    assert shared.repeated == [[2], [2]]


def test_drop_last_misses_samples() -> None:
    found = coverage(DistributedSampler(range(10), 4, 0, shuffle=False, drop_last=True))
    assert found.missing == [[8, 9], [8, 9]]
    assert found.disjoint
    assert "2 never drawn in epoch 0 (8, 9)" in found.summary()


def test_forgotten_set_epoch() -> None:
    sampler = DistributedSampler(range(20), 2, 0, seed=3)
    assert coverage(sampler).same_order is False
    forgotten = coverage(sampler, set_epoch=False, epochs=3)
    assert forgotten.same_order is True
    assert "sampler.set_epoch(epoch) is missing" in forgotten.summary()
    assert "reshuffled  yes" in coverage(sampler).summary()


def test_no_distributed_sampler() -> None:
    found = coverage(lambda rank: RandomSampler(range(8)), ranks=3)
    assert found.repeated == [list(range(8))] * 2
    assert (found.complete, found.even, found.padded) == (True, True, False)
    assert "16 draws repeat an index (0, 1, 2, 3, 4, 5, …): ranks share samples" in found.summary()


def test_uneven_ranks() -> None:
    found = coverage([[0, 2, 4], [1, 3]])
    assert not found.even
    assert found.disjoint and found.complete
    assert "2 to 3 draws on each" in found.summary()
    assert "leaves the others waiting" in found.summary()


@pytest.mark.parametrize("kind", ["loader", "loaders", "batches"])
def test_batches_and_loaders(kind: str) -> None:
    def loader(rank: int) -> Any:
        return DataLoader(range(8), 2, sampler=DistributedSampler(range(8), 2, rank, shuffle=False))

    def batches(rank: int) -> Any:
        return BatchSampler(SequentialSampler(range(4 * rank, 4 * rank + 4)), 3, False)

    given: dict[str, Any] = {
        "loader": loader(0), "loaders": [loader(0), loader(1)], "batches": [batches(0), batches(0)],
    }  # fmt: skip
    expected = [[0, 2, 4, 6], [1, 3, 5, 7]] if kind != "batches" else [[0, 1, 2, 3]] * 2
    assert coverage(given[kind]).orders == [expected] * 2


@pytest.mark.parametrize("kind", ["list", "loaders", "one", "one loader"])
def test_set_epoch_reaches_the_sampler_within(kind: str) -> None:
    def batches(rank: int) -> BatchSampler:
        return BatchSampler(DistributedSampler(range(12), 2, rank), 2, False)

    def loader(rank: int) -> Any:
        return DataLoader(range(12), batch_sampler=batches(rank))

    given = {
        "list": [batches(0), batches(1)], "loaders": [loader(0), loader(1)],
        "one": batches(1), "one loader": loader(1),
    }[kind]  # fmt: skip
    found = coverage(given)
    expected = []
    for epoch in range(2):
        samplers = [DistributedSampler(range(12), 2, rank) for rank in range(2)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        expected.append([list(sampler) for sampler in samplers])
    assert found.orders == expected
    assert found.same_order is False
    assert coverage(given, set_epoch=False).same_order is True


def test_loader_that_drops_its_last_batch() -> None:
    """Six samples on each of two ranks in batches of four: two of each are dropped."""
    sampler = DistributedSampler(range(12), 2, 0, shuffle=False)
    found = coverage(DataLoader(range(12), 4, sampler=sampler, drop_last=True))
    assert found.orders == [[[0, 2, 4, 6], [1, 3, 5, 7]]] * 2
    assert found.missing == [[8, 9, 10, 11]] * 2


def test_loader_that_knows_no_ranks() -> None:
    loader = DataLoader(range(11), 4, shuffle=True)
    with pytest.raises(ValueError, match="every rank would read everything"):
        coverage(loader)
    assert coverage(loader, 3).repeated == [list(range(11))] * 2
    assert "ranks share samples" in coverage(loader, 3).summary()


def test_figure_shows_every_draw() -> None:
    found = coverage(DistributedSampler(range(10), 4, 0), epochs=2)
    figure = found.figure()
    assert len(figure.axes) == 2
    assert [len(axes.patches) for axes in figure.axes] == [12, 12]
    written = sorted(int(text.get_text()) for text in figure.axes[0].texts)
    assert written == sorted([1, 2, 3] * 4)
    assert "2 repeated" in figure.axes[0].get_title(loc="left")
    large = coverage(DistributedSampler(range(5000), 64, 0)).figure()
    assert "the first 240 of 5,000" in large.axes[-1].get_xlabel()


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        (lambda rank: [rank], {}, "ranks must say how many"),
        (lambda rank: [rank], {"ranks": 0}, "ranks must say how many"),
        ([], {}, "one sampler for each rank"),
        (3, {}, "one sampler for each rank"),
        ([[0], [1]], {"ranks": 3}, "samplers for 2 ranks, not for 3"),
        ([["a"]], {}, "sampler of rank 0 draws 'a'"),
        ([[7]], {"size": 5}, "draw 7, but there are 5"),
        ([[0]], {"epochs": 0}, "epochs must be"),
    ],
)
def test_impossible_requests(given: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coverage(given, **more)


def test_nothing_to_draw() -> None:
    empty = coverage([[], []])
    assert isinstance(empty, Coverage)
    assert empty.size == 0
    assert empty.complete
    assert "set_epoch" not in empty.summary()
