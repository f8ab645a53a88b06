"""The colours of every figure and of the live view: fixed, and never the only sign.

Okabe & Ito (2008), a palette that people with any common colour blindness tell apart; waits are
hatched as well, since grey on white has little contrast.
"""

from __future__ import annotations

from typing import NamedTuple


class Style(NamedTuple):
    """How one kind of span looks: its fill, its hatch (matplotlib's letters) and its name."""

    colour: str
    hatch: str
    label: str


KIND_STYLES = {
    "read": Style("#F0E442", "", "read"),
    "decode": Style("#A6761D", "", "decode"),
    "augment": Style("#882255", "", "augment"),
    "collate": Style("#333333", "", "collate"),
    "data": Style("#BBBBBB", "////", "data wait"),
    "copy": Style("#E69F00", "", "copy"),
    "forward": Style("#56B4E9", "", "forward"),
    "backward": Style("#0072B2", "", "backward"),
    "communication": Style("#D55E00", "", "communication"),
    "optimizer": Style("#009E73", "", "optimizer"),
    "span": Style("#CC79A7", "", "named span"),
    "wait": Style("#E4E4E4", "\\\\\\\\", "wait"),
    "other": Style("#8C8C8C", "", "other"),
}
"""In the order of the legend; the keys are ``trace.KINDS``."""

MEMORY = "#6A5ACD"
"""Allocated memory: a colour that no span has."""

CAPACITY = "#C1121F"
"""The line above which a device is out of memory."""

LANE_LABELS = {"communication": "comm."}
"""Lanes whose names are too long for the margin."""

MEMORY_DARK, CAPACITY_DARK = "#A99BF5", "#FF7B7B"
"""The same two on a dark background (the live view follows JupyterLab's theme)."""
