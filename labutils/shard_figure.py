"""A picture of who draws which sample: ranks × indices, epoch by epoch."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from labutils.colours import KIND_STYLES
from labutils.figures import FAINT, TEXT, WIDTH, TraceFigure
from labutils.shards import Coverage

ONCE, AGAIN = KIND_STYLES["forward"].colour, KIND_STYLES["communication"].colour
_ROW, _TITLE, _BOTTOM = 0.26, 0.42, 0.75  # inches
_WRITTEN, _SHOWN = 40, 240
"""Up to so many indices, each cell says when it is drawn; so many indices are shown."""


def draw(coverage: Coverage) -> TraceFigure:
    """One grid per epoch (three at most), with the order of the draws where there is room."""
    shown = coverage.orders[:3]
    rows = min(coverage.ranks, 16)
    part = _ROW * rows + _TITLE
    height = part * len(shown) + _BOTTOM
    figure = TraceFigure(figsize=(WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.description = f"who draws which of {coverage.size} samples, {coverage.ranks} ranks"
    for epoch in range(len(shown)):
        bottom = (height - part * (epoch + 1)) / height
        axes = figure.add_axes((0.08, bottom, 0.89, _ROW * rows / height))
        _grid(axes, coverage, epoch, last=epoch == len(shown) - 1)
    figure.legend(
        handles=[Patch(color=ONCE, label="drawn once"),
                 Patch(facecolor=AGAIN, hatch="////", edgecolor="white", label="drawn repeatedly"),
                 Patch(facecolor="white", edgecolor=FAINT, label="not drawn by this rank")],
        loc="lower right", ncols=3, fontsize=8, frameon=False, labelcolor=TEXT,
    )  # fmt: skip
    return figure


def _grid(axes: Axes, coverage: Coverage, epoch: int, last: bool) -> None:
    shown = min(coverage.size, _SHOWN)
    for rank, order in enumerate(coverage.orders[epoch]):
        for position, index in enumerate(order):
            if index < shown:
                _cell(axes, coverage, epoch, rank, index, position + 1)
    axes.set_xlim(-0.5, shown - 0.5)
    axes.set_ylim(coverage.ranks - 0.5, -0.5)
    axes.set_yticks(range(coverage.ranks) if coverage.ranks <= 16 else [0, coverage.ranks - 1])
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.tick_params(labelsize=7.5, colors=TEXT, labelbottom=last)
    axes.set_ylabel("rank", fontsize=8.5, color=TEXT)
    axes.set_title(_title(coverage, epoch), fontsize=9, color=TEXT, weight="bold", loc="left")
    if last:
        more = f": the first {shown} of {coverage.size:,}" * (shown < coverage.size)
        more = more or "; in the cells: the order in which the rank draws" * (shown <= _WRITTEN)
        axes.set_xlabel(f"index in the data set{more}", fontsize=8.5, color=TEXT, loc="left")


def _cell(axes: Axes, coverage: Coverage, epoch: int, rank: int, index: int, position: int) -> None:
    again = coverage.counts[epoch][index] > 1
    axes.add_patch(Rectangle(
        (index - 0.5, rank - 0.5), 1, 1, facecolor=AGAIN if again else ONCE, edgecolor="white",
        hatch="////" if again and coverage.size <= 4 * _WRITTEN else None,
        linewidth=0.6 if coverage.size <= 4 * _WRITTEN else 0,
    ))  # fmt: skip
    if coverage.size <= _WRITTEN:
        box = {"pad": 0.6, "facecolor": "white", "edgecolor": "none"} if again else None
        axes.text(
            index, rank, str(position), ha="center", va="center", fontsize=7, color=TEXT, bbox=box
        )


def _title(coverage: Coverage, epoch: int) -> str:
    repeated, missing = coverage.repeated[epoch], coverage.missing[epoch]
    same = epoch > 0 and coverage.orders[epoch] == coverage.orders[0]
    facts = [
        f"{len(repeated)} repeated" * bool(repeated), f"{len(missing)} missing" * bool(missing),
        "the same order as epoch 0" * same,
    ]  # fmt: skip
    return f"epoch {epoch}: " + (", ".join(filter(None, facts)) or "each index once")
