"""Pictures of a prediction: memory by category, and how speed grows with the number of GPUs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FuncFormatter, NullLocator

from labutils.colours import CAPACITY, KIND_STYLES, MEMORY
from labutils.figures import FAINT, TEXT, WIDTH, TraceFigure, png_metadata
from labutils.layout import memory_unit

GRID = "#E3E6EA"
Curve = Sequence[tuple[int, float]]


def memory_and_scaling(
    memory: Mapping[str, int], capacity: int, curve: Curve, here: tuple[int, float], alone: float,
    hardware: str,
) -> TraceFigure:  # fmt: skip
    """What fills a GPU's memory, beside samples per second over the number of GPUs.

    Args:
        memory: bytes by category, in the order in which they are stacked, and "peak", their sum.
        capacity: bytes of the GPU.
        curve: (GPUs, samples per second), ascending.
        here: the point to mark.
        alone: samples per second of one GPU without DDP, which the percentages are of.
    """
    figure = TraceFigure(figsize=(WIDTH, 2.75), facecolor="white")
    FigureCanvasAgg(figure)
    figure.description = f"memory per GPU and scaling curve · simulated · {hardware}"
    _memory(figure.add_axes((0.1, 0.2, 0.36, 0.66)), memory, capacity)
    _scaling(figure.add_axes((0.58, 0.2, 0.4, 0.66)), curve, here, alone)
    return figure


def _memory(axes: Axes, memory: Mapping[str, int], capacity: int) -> None:
    """Each category begins where the one above it ends; the last row is all of them."""
    peak = memory["peak"]
    divisor, unit = memory_unit(max(peak, capacity))
    rows = [name for name in memory if name != "peak"]
    start, most = 0.0, max(peak, capacity) / divisor
    for row, name in enumerate([*rows, "peak"]):
        amount = memory[name] / divisor
        left, colour = (0.0, TEXT) if name == "peak" else (start, MEMORY)
        axes.barh(row, amount, left=left, height=0.62, color=colour, alpha=0.85)
        start += amount
        _amount(axes, row, left, left + amount, most)
    axes.axvline(capacity / divisor, zorder=3, color=CAPACITY, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set_yticks(range(len(rows) + 1), [*rows, "at its peak"])
    axes.set_ylim(len(rows) + 0.6, -0.6)
    axes.set_xlim(0, most * 1.12)
    fits = "fits" if peak <= capacity else "OUT OF MEMORY"
    _dress(axes, f"memory of each GPU: {fits}", f"{unit} (dashed: all that a GPU has)")
    axes.grid(axis="y", visible=False)
    if peak > capacity:
        axes.title.set_color(CAPACITY)


def _amount(axes: Axes, row: int, left: float, right: float, most: float) -> None:
    """Writes behind a bar how long it is, or into it, where the line of the capacity is near."""
    inside = right > 0.75 * most and right - left > 0.2 * most
    axes.annotate(
        f"{right - left:.2f}", (right, row), (-4 if inside else 4, 0), fontsize=7.5,
        textcoords="offset points", va="center", ha="right" if inside else "left",
        color="white" if inside else TEXT, zorder=4,
    )  # fmt: skip


def _scaling(axes: Axes, curve: Curve, here: tuple[int, float], alone: float) -> None:
    worlds, rates = [n for n, _ in curve], [rate for _, rate in curve]
    blue, orange = KIND_STYLES["backward"].colour, KIND_STYLES["communication"].colour
    perfect = [alone * n for n in worlds]
    label = "one GPU without DDP, times their number (100%)"
    axes.plot(worlds, perfect, "--", color=FAINT, linewidth=1, label=label)
    axes.plot(worlds, rates, "o-", color=blue, markersize=4, label="predicted, with full nodes")
    axes.plot([here[0]], [here[1]], "D", color=orange, markersize=7, label="the step above")
    for world, rate in curve:
        axes.annotate(
            f"{rate / world / alone:.0%}", (world, rate), (5, -10), fontsize=7, color=blue,
            textcoords="offset points",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)  # a curve may span less than one power of ten
    axes.set_xticks(worlds)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_locator(NullLocator())
    axes.margins(x=0.08, y=0.12)
    _dress(axes, "scaling", "GPUs")
    axes.set_ylabel("samples per second", fontsize=8.5, color=TEXT)
    axes.legend(fontsize=7.5, frameon=False, labelcolor=TEXT)


def _dress(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(f"{title} · simulated", fontsize=9, color=TEXT, weight="bold", loc="left")
    axes.set_xlabel(unit, fontsize=8.5, color=TEXT)
    axes.tick_params(labelsize=8, colors=TEXT)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def display_data(figure: TraceFigure) -> tuple[dict[str, Any], dict[str, Any]]:
    """(data, metadata) for a notebook.

    Coarser than the other figures and hardly compressed: a slider should answer at once.
    """
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=100, metadata={"Software": None},
        pil_kwargs={"compress_level": 1},
    )  # fmt: skip
    data = {"image/png": buffer.getvalue(), "text/plain": figure.description}
    return data, {"image/png": png_metadata(figure.description)}


__all__ = ["display_data", "memory_and_scaling"]
