"""The picture of who holds what."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from labutils import holdings


def cells(axes: object) -> list[tuple[str, str]]:
    """(number, colour) of each cell, row by row."""
    boxes = [p for p in axes.patches if isinstance(p, Rectangle)]  # type: ignore[attr-defined]
    texts = [t.get_text() for t in axes.texts if t.get_text() != "nothing"]  # type: ignore[attr-defined]
    return [(text, to_hex(box.get_facecolor()).upper()) for text, box in zip(texts, boxes)]


def test_a_number_keeps_the_colour_of_the_rank_it_came_from() -> None:
    figure = holdings.before_after([[0, 1], [10, 11]], [[0, 10], [1, 11]], "all_to_all")
    after = cells(figure.axes[1])
    first, second = holdings.PALETTE[0].upper(), holdings.PALETTE[1].upper()
    assert after == [("0", first), ("10", second), ("1", first), ("11", second)]


def test_sums_are_white_and_nothing_is_said_to_be_nothing() -> None:
    figure = holdings.before_after(
        [torch.tensor([1.0]), torch.tensor([2.0])], [[3.0], None], "reduce"
    )
    assert cells(figure.axes[1]) == [("3", "#FFFFFF")]
    assert "nothing" in [t.get_text() for t in figure.axes[1].texts]


def test_the_axes_name_the_ranks_and_the_operation() -> None:
    figure = holdings.before_after([[1]] * 3, [[1]] * 3, "broadcast")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]
    assert figure.axes[1].get_title(loc="left") == "after broadcast"


def test_unequal_numbers_of_ranks_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 ranks before and 1 after"):
        holdings.before_after([[1], [2]], [[1]], "gather")
