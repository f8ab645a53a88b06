"""Who holds what: a picture of every rank's tensor before and after a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labutils.figures import TraceFigure

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#BBBBBB")
"""Okabe-Ito, one colour a rank; the number in each cell says the same without colour."""
_RESULT = "#FFFFFF"

Holding = Sequence[float] | None


def before_after(before: Sequence[Any], after: Sequence[Any], title: str) -> TraceFigure:
    """Draw what each rank held before and after an operation.

    Args:
        before, after: one entry per rank: a tensor or list of numbers, or None for nothing.
        title: what was done in between.

    A cell has the colour of the rank that had its number before; numbers that nobody had (sums)
    are white.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from labutils.figures import TraceFigure

    if len(before) != len(after):
        raise ValueError(f"{len(before)} ranks before and {len(after)} after: give one entry each.")
    held, holds = [_numbers(x) for x in before], [_numbers(x) for x in after]
    owner: dict[float, int] = {}
    for rank, numbers in enumerate(held):
        for number in numbers:
            owner.setdefault(number, rank)
    columns = max([1, *map(len, held + holds)])
    figure = TraceFigure(figsize=(min(10.0, 2.2 + 1.0 * columns), 0.42 * len(held) + 0.75))
    FigureCanvasAgg(figure)
    figure.description = f"who holds what before and after {title}"
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, held, owner, columns, "before")
    _draw(right, holds, owner, columns, f"after {title}")
    left.set_yticks(range(len(held)), [f"rank {r}" for r in range(len(held))])
    figure.tight_layout()
    return figure


def _numbers(value: Any) -> list[float]:
    if value is None:
        return []
    flat = value.flatten().tolist() if hasattr(value, "flatten") else list(value)
    return [float(number) for number in flat]


def _draw(
    axes: Axes, held: list[list[float]], owner: dict[float, int], columns: int, title: str
) -> None:
    from matplotlib.patches import Rectangle

    for rank, numbers in enumerate(held):
        for column, number in enumerate(numbers):
            source = owner.get(number)
            colour = _RESULT if source is None else PALETTE[source % len(PALETTE)]
            axes.add_patch(
                Rectangle((column, rank - 0.4), 0.96, 0.8, facecolor=colour, edgecolor="#444444")
            )
            axes.text(column + 0.48, rank, f"{number:g}", ha="center", va="center", fontsize=9)
        if not numbers:
            axes.text(0.1, rank, "nothing", va="center", fontsize=9, color="#777777")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(len(held) - 0.4, -0.6), xticks=[])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
