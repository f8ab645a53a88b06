"""Pictures of how fast a loader is, over the number of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import MaxNLocator

from labutils.colours import KIND_STYLES
from labutils.figures import FAINT, TEXT, WIDTH, TraceFigure
from labutils.loading.model import LoadingModel

if TYPE_CHECKING:
    from labutils.timing.published import Point


def workers(
    model: LoadingModel, measured: Mapping[int, float], published: Sequence[Point] = ()
) -> TraceFigure:
    """Time per batch over the number of workers: what the model predicts, and what was measured.

    Args:
        measured: seconds per batch by number of workers.
        published: rows of somebody else's sweep whose names end in the number of workers; they are
            drawn beside, in their own unit.
    """
    figure = TraceFigure(figsize=(WIDTH, 2.9), facecolor="white")
    FigureCanvasAgg(figure)
    figure.description = "time per batch over the number of workers, predicted and measured"
    left = figure.add_axes((0.08, 0.19, 0.5 if published else 0.86, 0.66))
    most = max([4, *measured])
    numbers = list(range(most + 1))
    blue, red = KIND_STYLES["backward"].colour, KIND_STYLES["communication"].colour
    times = [1e3 * model.seconds(n) for n in numbers]
    left.plot(numbers, times, "--", color=blue, label="predicted by the model")
    left.plot(list(measured), [1e3 * s for s in measured.values()], "o", color=red,
              label="measured here")  # fmt: skip
    left.axhline(
        1e3 * model.step_s, color=FAINT, linewidth=1, linestyle=":", label="the step alone"
    )
    left.set_ylim(bottom=0)
    _style(left, "workers", "time per batch [ms]", "this machine")
    left.legend(fontsize=8, frameon=False, labelcolor=TEXT)
    if published:
        _published(figure.add_axes((0.68, 0.19, 0.28, 0.66)), published)
    return figure


def _published(axes: Any, points: Sequence[Point]) -> None:
    names = [point.name.rsplit("-", 1)[-1] for point in points]
    axes.bar(names, [point.value for point in points], width=0.5,
             color=KIND_STYLES["optimizer"].colour)  # fmt: skip
    first = points[0]
    _style(axes, "workers", f"{first.what} [{first.unit}]", f"published: {first.source}")


def _style(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x, fontsize=8.5, color=TEXT)
    axes.set_ylabel(y, fontsize=8.5, color=TEXT)
    axes.set_title(title, fontsize=9, color=TEXT)
    axes.tick_params(labelsize=8, colors=TEXT)
    axes.grid(axis="y", color="#E3E6EA", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


__all__ = ["workers"]
