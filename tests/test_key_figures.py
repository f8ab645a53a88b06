"""Key figures: what a learner reads, and what a program finds in the output's metadata."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

import labutils as lab
from labutils import hardware


def mark(figure: Any) -> dict[str, Any]:
    """As a kernel makes an output from the value of a cell's last line."""
    data, metadata = DisplayFormatter().format(figure)
    assert set(data) >= {"text/plain"}
    return metadata["labutils"]["figure"]


def test_it_reads_as_a_sentence_and_is_kept() -> None:
    figure = lab.key_figure("bus bandwidth", 12.345, "GB/s", "measured", expected=(10, 20))
    assert repr(figure) == "bus bandwidth: 12.35 GB/s (measured; 10 to 20 expected)"
    assert mark(figure) == {
        "name": "bus bandwidth", "value": 12.345, "unit": "GB/s", "source": "measured",
        "expected": [10, 20], "within": True,
    }  # fmt: skip


@pytest.mark.parametrize(("value", "within"), [(0.9, False), (1, True), (2, True), (2.1, False)])
def test_the_ends_of_the_range_belong_to_it(value: float, within: bool) -> None:
    figure = lab.key_figure("speed", value, "x", "simulated", expected=(1, 2))
    assert mark(figure)["within"] is within
    assert ("outside" in repr(figure)) is not within


def test_the_range_is_that_of_this_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"A100": (100, 200), "CPU": (1, 2)}
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    assert mark(lab.key_figure("b", 1, "GB/s", "measured", ranges))["expected"] == [1, 2]
    gpu = hardware.Gpu("NVIDIA A100-SXM4-80GB", 80 << 30, 108)
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu, gpu))
    assert mark(lab.key_figure("b", 1, "GB/s", "measured", ranges))["expected"] == [100, 200]
    monkeypatch.setattr(hardware, "gpus", lambda: (hardware.Gpu("Tesla T4", 15 << 30, 40),))
    unknown = lab.key_figure("b", 1, "GB/s", "measured", ranges)
    assert mark(unknown)["expected"] is None
    assert repr(unknown) == "b: 1 GB/s (measured)"


def test_a_number_that_is_none_is_outside() -> None:
    assert mark(lab.key_figure("b", float("nan"), "s", "measured", (0, 1)))["within"] is False


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="'measured' or 'simulated', not 'guessed'"):
        lab.key_figure("b", 1, "s", "guessed")
    with pytest.raises(ValueError, match="runs from 2 to 1"):
        lab.key_figure("b", 1, "s", "measured", (2, 1))
