"""Key figures: the few numbers of a lab that tell whether a machine is as fast as its kind.

A notebook publishes one in a line of its own::

    lab.key_figure("bus bandwidth of all_reduce", 12.3, "GB/s", "measured",
                   expected={"A100": (200, 240), "CPU": (0.5, 20)})

It is shown, and kept in the metadata of the output, from where ``labutils run`` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from labutils.exercises import Note

SOURCES = ("measured", "simulated")
Range = tuple[float, float]


class KeyFigure(Note):
    """A published number; its ``mark`` is what a batch run reads."""


def key_figure(
    name: str,
    value: float,
    unit: str,
    source: str,
    expected: Range | Mapping[str, Range] | None = None,
) -> KeyFigure:
    """Publish one number of this lab.

    Args:
        name: what it is, in a few words, the same in every run.
        value: the number.
        unit: its unit ("GB/s", "samples/s", "ms", "%").
        source: "measured" or "simulated".
        expected: lowest and highest value that this class of hardware gives; or such pairs by
            class, where a class is a part of the GPU's name ("A100"), or "CPU" without GPUs.

    Raises:
        ValueError: for an unknown source or a range whose ends are the wrong way round.
    """
    if source not in SOURCES:
        raise ValueError(f"a key figure is 'measured' or 'simulated', not {source!r}.")
    limits = _for_this_machine(expected)
    if limits is not None and not limits[0] <= limits[1]:
        raise ValueError(f"the expected range of {name!r} runs from {limits[0]} to {limits[1]}.")
    mark = {
        "name": name,
        "value": float(value),
        "unit": unit,
        "source": source,
        "expected": list(limits) if limits else None,
        "within": limits is None or limits[0] <= value <= limits[1],
    }
    return KeyFigure(f"{name}: {value:.4g} {unit} ({_about(mark)})", mark={"figure": mark})


def _for_this_machine(expected: Range | Mapping[str, Range] | None) -> Range | None:
    if not isinstance(expected, Mapping):
        return expected
    from labutils import hardware

    gpus = hardware.gpus()
    name = gpus[0].name if gpus else "CPU"
    return next((limits for kind, limits in expected.items() if kind in name), None)


def _about(mark: Mapping[str, Any]) -> str:
    if mark["expected"] is None or not math.isfinite(mark["value"]):
        return str(mark["source"])
    low, high = mark["expected"]
    outside = "" if mark["within"] else ", so this is outside"
    return f"{mark['source']}; {low:g} to {high:g} expected{outside}"
