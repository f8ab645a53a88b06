"""Figures: where things are drawn, read back from the drawn picture itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from labutils import figures, layout
from labutils.colours import KIND_STYLES
from labutils.trace import KINDS, MemorySample, Span, Trace

GIB = 2**30
DRAWINGS: list[Callable[..., figures.TraceFigure]] = [
    figures.overview, figures.timeline, figures.memory,
]  # fmt: skip


def small_trace() -> Trace:
    spans = [
        Span("h2d", 0.000, 0.002, "GPU 0", "copy", "copy"),
        Span("conv", 0.002, 0.006, "GPU 0", "compute", "forward"),
        Span("conv_backward", 0.006, 0.010, "GPU 0", "compute", "backward"),
        Span("forward", 0.000, 0.006, "host", "main", "span"),
    ]
    samples = [MemorySample(0.0, "GPU 0", GIB), MemorySample(0.006, "GPU 0", 9 * GIB)]
    return Trace("simulated", "T4", "one step", spans, samples, {"GPU 0": 16 * GIB})


def words(figure: Figure) -> list[str]:
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    texts += [axes.get_xlabel() for axes in figure.axes]
    return texts + [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def pixels(figure: Figure) -> Any:
    return imread(BytesIO(figures.png(figure)))[:, :, :3]


def columns_of(image: Any, colour: str) -> Any:
    """Numbers of the columns of pixels in which a colour appears at full strength."""
    close = np.abs(image - np.array(to_rgb(colour))).max(axis=2) < 0.02
    # a swatch of the legend has the same colour: only the part above the axis counts
    return np.flatnonzero(close[: -int(0.6 * figures.DPI)].any(axis=0))


def test_bars_stand_where_time_puts_them() -> None:
    image = pixels(figures.timeline(small_trace(), host=False))
    plot = (figures.WIDTH - figures.LEFT - figures.RIGHT) * figures.DPI
    for kind, start, end in (("copy", 0.0, 0.2), ("forward", 0.2, 0.6), ("backward", 0.6, 1.0)):
        columns = columns_of(image, KIND_STYLES[kind].colour)
        left = figures.LEFT * figures.DPI
        assert columns[0] == pytest.approx(left + start * plot, abs=2)
        assert columns[-1] == pytest.approx(left + end * plot, abs=2)


def test_says_what_it_shows() -> None:
    said = words(figures.overview(small_trace()))
    for text in ("one step", "simulated · T4", "time [ms]", "GPU 0", "compute", "copy", "host",
                 "main", "16 GiB", "peak 9 GiB", "forward", "backward"):  # fmt: skip
        assert text in said


def test_legend_names_only_what_is_drawn() -> None:
    said = words(figures.timeline(small_trace(), host=False))
    assert "named span" not in said
    assert "optimizer" not in said


def test_capacity_far_above_the_peak_is_written_not_drawn() -> None:
    trace = small_trace()
    trace.capacity = {"GPU 0": 80 * GIB}
    assert "peak 9 GiB\nof 80 GiB" in words(figures.overview(trace))


@pytest.mark.parametrize("capacity", [16 * GIB, 1010 * GIB])
@pytest.mark.parametrize("held", [9 * GIB, 1010 * 2**20])
def test_the_peak_is_written_beside_its_curve(held: int, capacity: int) -> None:
    trace = small_trace()
    trace.memory = [MemorySample(0.0, "GPU 0", held)]
    trace.capacity = {"GPU 0": capacity}
    figure = figures.overview(trace)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (peak,) = [text for text in axes.texts if text.get_text().startswith("peak")]
    box = peak.get_window_extent()
    assert axes.bbox.x1 < box.x0 < box.x1 <= figure.bbox.x1


def test_lost_entries_and_notes_are_said() -> None:
    trace = small_trace()
    trace.dropped, trace.notes = 1234, ["clocks agree to 1 ms"]
    assert "1,234 entries were lost; clocks agree to 1 ms" in words(figures.overview(trace))


@pytest.mark.parametrize("draw", DRAWINGS)
def test_nothing_recorded(draw: Callable[..., Figure]) -> None:
    figure = draw(Trace("measured", "CPU", "empty"))
    assert "nothing was recorded" in words(figure)
    assert figures.png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", DRAWINGS)
def test_same_trace_same_bytes_and_same_text(draw: Callable[..., figures.TraceFigure]) -> None:
    one, two = draw(small_trace()), draw(small_trace())
    assert figures.png(one) == figures.png(two) == one._repr_png_()[0]
    assert repr(one) == repr(two) == "<one step · simulated · T4>"


def test_compare_shares_the_time_axis() -> None:
    long = small_trace()
    long.spans.append(Span("sgd", 0.030, 0.040, "GPU 0", "compute", "optimizer"))
    figure = figures.compare([small_trace(), long], ["measured", "predicted"])
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 0.040)}
    assert {"measured", "predicted", "optimizer"} <= set(words(figure))
    with pytest.raises(ValueError, match="one label for each trace"):
        figures.compare([long], [])


def test_pyplot_is_not_touched() -> None:
    code = """import sys
from labutils import figures
from labutils.trace import Trace
figures.png(figures.overview(Trace()))
assert "matplotlib.pyplot" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_kind_has_a_style_and_no_two_look_alike() -> None:
    assert tuple(KIND_STYLES) == KINDS
    colours = [to_rgb(style.colour) for style in KIND_STYLES.values()]
    for i, one in enumerate(colours):
        assert all(max(np.abs(np.subtract(one, other))) > 0.1 for other in colours[:i])


# -- layout ----------------------------------------------------------------------------------------


def test_levels_separate_what_overlaps() -> None:
    times = [(0, 10), (1, 4), (2, 3), (4, 9), (10, 12)]
    spans = [Span("x", start, end, "GPU 0", "compute", "other") for start, end in times]
    assert layout.levels(spans) == [0, 1, 2, 1, 0]


def test_narrow_bars_are_added_up_and_stay_pale() -> None:
    band = layout.Band("GPU 0", "compute", 0.0, 1.0)
    spans = [Span("x", i * 1e-3, i * 1e-3 + 2e-4, "GPU 0", "compute", "forward")
             for i in range(10_000)]  # fmt: skip
    (bars,) = layout.bars(spans, band, pixel=0.01).values()  # ten spans of 20 % in each pixel
    assert len(bars.left) == 1
    assert (bars.left[0], bars.right[0]) == (0.0, pytest.approx(10.0))
    assert bars.strength[0] == 0.25


def test_memory_keeps_its_peak_when_thinned() -> None:
    trace = small_trace()
    trace.memory = [MemorySample(i * 1e-6, "GPU 0", 1000 + i % 7) for i in range(10_000)]
    trace.memory[4321] = MemorySample(4321e-6, "GPU 0", 99_999)
    time, held = layout.memory_steps(trace, "GPU 0", pixel=1e-4)
    assert len(time) <= 2 * 100 + 1
    assert held.max() == 99_999
    assert np.all(np.diff(time) >= 0)
    assert (time[-1], held[-1]) == (trace.duration, trace.memory[-1].allocated)


@pytest.mark.parametrize("devices", [1, 8, 64])
def test_strips_do_not_overlap_and_fit(devices: int) -> None:
    trace = Trace(spans=[Span("x", 0, 1, f"GPU {i}", lane, "other")
                         for i in range(devices) for lane in ("compute", "copy")])  # fmt: skip
    rows, total = layout.bands(trace)
    assert len(rows) == 2 * devices
    assert total < max(9.0, 0.375 * devices) + 1e-9
    for above, below in pairwise(rows):
        assert above.top + above.height < below.top
