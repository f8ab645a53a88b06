"""Pictures of a trace, for notebooks, files and slides.

``overview`` shows memory above each GPU's lanes, ``timeline`` the lanes alone, ``memory`` the
memory alone, and ``compare`` two or more timelines on one time axis.  All return a matplotlib
Figure that a notebook shows by itself; pyplot's global state is not touched.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labutils import layout
from labutils.colours import CAPACITY, KIND_STYLES, LANE_LABELS, MEMORY
from labutils.layout import Band
from labutils.trace import Span, Trace

WIDTH = 9.6
LEFT, RIGHT, TOP, BOTTOM = 1.3, 0.85, 0.42, 0.85
"""The width of a figure and its margins, in inches."""

DPI = 130
TEXT = "#24292F"
FAINT = "#6E7781"
MAX_LABELS = 80
"""Names that are written into bars of one figure."""


class TraceFigure(Figure):
    """A Figure that a notebook shows as a picture, with a text that stays the same."""

    description = "figure of a trace"

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return png(self), png_metadata(self.description)

    def __repr__(self) -> str:
        return f"<{self.description}>"


def overview(trace: Trace, *, host: bool = True, title: str | None = None) -> TraceFigure:
    """One row per GPU: its memory strip above its lanes; the host's threads below."""
    return _single(trace, title, *layout.bands(trace, host=host))


def timeline(trace: Trace, *, host: bool = True, title: str | None = None) -> TraceFigure:
    """One row per GPU: its lanes; the host's threads below."""
    return _single(trace, title, *layout.bands(trace, host=host, memory=False, lane_height=0.24))


def memory(trace: Trace, *, title: str | None = None) -> TraceFigure:
    """One strip per device: allocated memory over time, with the device's capacity."""
    return _single(trace, title, *layout.bands(trace, lanes=False, memory_height=0.9))


def compare(traces: Sequence[Trace], labels: Sequence[str], *, host: bool = False) -> TraceFigure:
    """Timelines above one another on the same time axis, e.g. measured and predicted."""
    if not traces or len(traces) != len(labels):
        raise ValueError(
            f"compare needs one label for each trace, not {len(traces)} traces and "
            f"{len(labels)} labels."
        )
    parts = [layout.bands(trace, host=host, memory=False, most=6.0) for trace in traces]
    duration = max(trace.duration for trace in traces)
    gap = 0.55
    figure = _figure(sum(total for _, total in parts) + gap * (len(parts) - 1))
    figure.description = "comparison of " + " and ".join(labels)
    y, kinds = 0.0, set[str]()
    for trace, label, (rows, total) in zip(traces, labels, parts, strict=True):
        axes = _axes(figure, y, total, duration)
        _draw(axes, trace, rows, duration)
        _heading(axes, trace, label)
        axes.tick_params(labelbottom=trace is traces[-1])
        y += total + gap
        kinds |= _kinds(trace, rows)
    _time_axis(axes, duration)
    _legend(figure, kinds)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes (the same figure gives the same bytes)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def png_metadata(description: str) -> dict[str, Any]:
    """For a notebook: shown at 100 pixels an inch, finer pixels serve sharp screens."""
    return {"width": round(WIDTH * 100), "alt": description}


# -- parts -----------------------------------------------------------------------------------------


def _single(trace: Trace, title: str | None, rows: list[Band], total: float) -> TraceFigure:
    title = trace.title if title is None else title
    figure = _figure(total)
    figure.description = " · ".join(filter(None, [title or "trace", _origin(trace)]))
    axes = _axes(figure, 0.0, total, trace.duration)
    _draw(axes, trace, rows, trace.duration)
    _heading(axes, trace, title)
    _legend(figure, _kinds(trace, rows))
    if rows:
        _time_axis(axes, trace.duration)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, color=FAINT,
                  ha="center", va="center", fontsize=9)  # fmt: skip
    return figure


def _figure(total: float) -> TraceFigure:
    figure = TraceFigure(figsize=(WIDTH, TOP + total + BOTTOM), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _axes(figure: Figure, y: float, total: float, duration: float) -> Axes:
    height = figure.get_figheight()
    box = (LEFT / WIDTH, 1 - (TOP + y + total) / height, 1 - (LEFT + RIGHT) / WIDTH, total / height)
    axes = figure.add_axes(box)
    axes.set_xlim(0, duration or 1.0)
    axes.set_ylim(total, 0)
    axes.set_yticks([])
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(position=("outward", 5), color=FAINT)
    axes.tick_params(axis="x", labelsize=8, colors=TEXT, color=FAINT)
    axes.grid(axis="x", color="#E3E6EA", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _draw(axes: Axes, trace: Trace, rows: list[Band], duration: float) -> None:
    pixel = (duration or 1.0) / ((WIDTH - LEFT - RIGHT) * DPI)
    labels = _Labels(axes, pixel)
    for row in rows:
        if row.lane:
            spans = layout.spans_of(trace, row.device, row.lane)
            _draw_lane(axes, row, spans, pixel)
            labels.write(row, spans)
        else:
            _draw_memory(axes, row, trace, pixel)
        if row.height > 0.09:
            name = LANE_LABELS.get(row.lane, row.lane) or "memory"
            _margin(axes, -0.08, row.top + row.height / 2, name, 7, FAINT)
    for device in dict.fromkeys(row.device for row in rows):
        own = [row for row in rows if row.device == device]
        top, bottom = own[0].top, own[-1].top + own[-1].height
        size = 9 if bottom - top > 0.14 else 5
        _margin(axes, 0.06 - LEFT, (top + bottom) / 2, device, size, TEXT, ha="left", weight="bold")


def _margin(
    axes: Axes, inches: float, y: float, text: str, size: float, colour: str, **how: Any
) -> None:
    how = {"ha": "right", "va": "center", "fontsize": size, "color": colour, **how}
    axes.annotate(
        text, (0 if inches < 0 else 1, y), (inches * 72, 0), annotation_clip=False,
        xycoords=axes.get_yaxis_transform(), textcoords="offset points", **how,
    )  # fmt: skip


def _draw_lane(axes: Axes, row: Band, spans: list[Span], pixel: float) -> None:
    axes.axhspan(row.top, row.top + row.height, color="#F3F4F6", linewidth=0, zorder=0.5)
    for kind, bars in layout.bars(spans, row, pixel).items():
        style = KIND_STYLES[kind]
        low, high = bars.top, bars.top + bars.height
        corners = [(bars.left, low), (bars.right, low), (bars.right, high), (bars.left, high)]
        wide = bars.right - bars.left > 4 * pixel
        axes.add_collection(
            PolyCollection(
                list(np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)),
                facecolors=[(style.colour, strength) for strength in bars.strength],
                # hatches take the colour of the edge; narrow bars would be all edge
                edgecolors="#8A8A8A" if style.hatch else ["white" if w else "none" for w in wide],
                linewidths=0.0 if style.hatch else 0.5,
                hatch=style.hatch or None,
                zorder=2,
            ),
            autolim=False,
        )


class _Labels:
    """Writes names into bars that have room for them."""

    def __init__(self, axes: Axes, pixel: float) -> None:
        self.axes, self.pixel, self.left = axes, pixel, MAX_LABELS

    def write(self, row: Band, spans: list[Span]) -> None:
        height = row.height / row.levels
        if height < 0.11:
            return
        for span, level in zip(spans, layout.levels(spans), strict=True):
            room = span.duration / self.pixel / DPI * 72
            if self.left and level < row.levels and room > 4.0 * len(span.name) + 6:
                self.left -= 1
                style = KIND_STYLES[span.kind]
                box = {"facecolor": style.colour, "edgecolor": "none", "pad": 0.8}
                self.axes.text(
                    (span.start + span.end) / 2, row.top + (level + 0.5) * height, span.name,
                    ha="center", va="center_baseline", fontsize=6.5, clip_on=True, zorder=3,
                    color=_ink(style.colour), bbox=box if style.hatch else None,
                )  # fmt: skip


def _ink(fill: str) -> str:
    """White on dark fills, dark on light ones (by perceived brightness)."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else TEXT


def _draw_memory(axes: Axes, row: Band, trace: Trace, pixel: float) -> None:
    scale = layout.memory_scale(trace)
    _, unit = layout.memory_unit(scale)
    bottom = row.top + row.height
    time, held = layout.memory_steps(trace, row.device, pixel)
    y = bottom - held / scale * row.height
    axes.axhspan(row.top, bottom, color="#F8F7FC", linewidth=0, zorder=0.5)
    axes.fill_between(time, y, bottom, step="post", color=MEMORY, alpha=0.28, linewidth=0, zorder=2)
    axes.plot(time, y, drawstyle="steps-post", color=MEMORY, linewidth=1.1, zorder=2)
    axes.axhline(bottom, color="#B9B4D8", linewidth=0.6, zorder=1)
    capacity = trace.capacity.get(row.device, 0)
    if 0 < capacity <= scale:
        line = bottom - capacity / scale * row.height
        axes.axhline(line, color=CAPACITY, linewidth=1.0, linestyle=(0, (5, 3)), zorder=2)
        if row.height > 0.1:
            _margin(axes, 0.06, line, _amount(capacity), 7, CAPACITY, ha="left")
        if row.height > 0.35:
            _margin(axes, 0.06, bottom, f"0 {unit}", 7, FAINT, ha="left", va="bottom")
    if row.height > 0.2:  # beside the strip: no curve lies under it there
        of = f"\nof {_amount(capacity)}" if capacity > scale else ""
        text = f"peak {_amount(trace.peak_memory(row.device))}{of}"
        _margin(axes, 0.06, row.top + 0.56 * row.height, text, 7, TEXT, ha="left")


def _amount(nbytes: float) -> str:
    divisor, unit = layout.memory_unit(nbytes)
    amount = nbytes / divisor
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"


def _origin(trace: Trace) -> str:
    return " · ".join(filter(None, [trace.source, trace.hardware]))


def _heading(axes: Axes, trace: Trace, title: str) -> None:
    where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points",
                             "va": "bottom", "annotation_clip": False}  # fmt: skip
    axes.annotate(title, (0, 1), (-(LEFT - 0.06) * 72, 7), fontsize=10.5, color=TEXT,
                  weight="bold", **where)  # fmt: skip
    axes.annotate(_origin(trace), (1, 1), ((RIGHT - 0.06) * 72, 7), fontsize=8, color=FAINT,
                  style="italic", ha="right", **where)  # fmt: skip
    for note in list(_notes(trace))[:1]:
        axes.annotate(note, (1, 0), ((RIGHT - 0.06) * 72, -34), fontsize=7, color=CAPACITY,
                      ha="right", **where)  # fmt: skip


def _notes(trace: Trace) -> Iterator[str]:
    if trace.dropped:
        yield "; ".join([f"{trace.dropped:,} entries were lost", *trace.notes])
    elif trace.notes:
        yield "; ".join(trace.notes)


def _time_axis(axes: Axes, duration: float) -> None:
    factor, unit = layout.time_unit(duration)
    axes.xaxis.set_major_locator(_ScaledLocator(factor))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t * factor:g}"))
    axes.set_xlabel(f"time [{unit}]", fontsize=8.5, color=TEXT, labelpad=2)


class _ScaledLocator(MaxNLocator):
    """Round ticks in the unit that is written, not in seconds."""

    def __init__(self, factor: float) -> None:
        super().__init__(nbins=10, steps=[1, 2, 2.5, 5, 10])
        self.factor = factor

    def tick_values(self, vmin: float, vmax: float) -> Any:
        ticks = np.asarray(super().tick_values(vmin * self.factor, vmax * self.factor))
        return ticks / self.factor


def _legend(figure: Figure, kinds: set[str]) -> None:
    handles = [
        Patch(facecolor=style.colour, label=style.label, hatch=style.hatch or None, linewidth=0,
              edgecolor="#8A8A8A" if style.hatch else "white")
        for kind, style in KIND_STYLES.items() if kind in kinds
    ]  # fmt: skip
    if handles:
        figure.legend(
            handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8,
            handlelength=1.6, handleheight=0.9, columnspacing=1.6, labelcolor=TEXT,
            bbox_to_anchor=(0.5, 0.04 / figure.get_figheight()),
        )  # fmt: skip


def _kinds(trace: Trace, rows: list[Band]) -> set[str]:
    shown = {(row.device, row.lane) for row in rows}
    return {span.kind for span in trace.spans if (span.device, span.lane) in shown}
