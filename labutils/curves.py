"""Pictures of how speed grows with the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FuncFormatter, NullLocator

from labutils.colours import KIND_STYLES
from labutils.figures import FAINT, TEXT, WIDTH, TraceFigure


def scaling(
    curve: Sequence[tuple[int, float]], here: tuple[int, float], hardware: str = ""
) -> TraceFigure:
    """Samples per second over the number of GPUs, beside the straight line of perfect scaling.

    Args:
        curve: (GPUs, samples per second), ascending.
        here: the point to mark.
    """
    figure = TraceFigure(figsize=(WIDTH, 2.6), facecolor="white")
    FigureCanvasAgg(figure)
    figure.description = f"scaling curve · simulated · {hardware}".rstrip(" ·")
    axes = figure.add_axes((0.1, 0.2, 0.82, 0.66))
    worlds = [n for n, _ in curve]
    rates = [rate for _, rate in curve]
    first = rates[0] / worlds[0]
    blue, orange = KIND_STYLES["backward"].colour, KIND_STYLES["communication"].colour
    axes.plot(worlds, [first * n for n in worlds], "--", color=FAINT, linewidth=1, label="perfect")
    axes.plot(worlds, rates, "o-", color=blue, markersize=4, label="predicted")
    axes.plot(*[[value] for value in here], "D", color=orange, markersize=7, label="the step above")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("GPUs", fontsize=8.5, color=TEXT)
    axes.set_ylabel("samples per second", fontsize=8.5, color=TEXT)
    axes.tick_params(labelsize=8, colors=TEXT)
    axes.grid(color="#E3E6EA", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"scaling · simulated · {hardware}".rstrip(" ·"), fontsize=9, color=TEXT)
    axes.legend(fontsize=8, frameon=False, labelcolor=TEXT)
    return figure


__all__ = ["scaling"]
