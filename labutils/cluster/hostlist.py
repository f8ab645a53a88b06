"""Node lists as Slurm writes them: ``node[001-003,7],gpu5``."""

from __future__ import annotations

import math
import re
from itertools import product

MOST = 100_000
"""Names in one list: more than any cluster has nodes."""
_PIECE = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]|,|.")


def expand(text: str) -> list[str]:
    """The names in a node list, in its order, as ``scontrol show hostnames`` prints them.

    Zeros in front are kept: ``n[08-10]`` is n08, n09, n10.  Several brackets in one name make all
    combinations.  What is no node list, or one of more than :data:`MOST` names, raises ValueError.
    """
    names: list[str] = []
    parts: list[list[str]] = []
    for piece in [*_PIECE.findall(text.strip()), ","]:
        if piece == ",":
            if not parts:
                raise ValueError(f"{text!r} is no list of nodes: a name is missing.")
            _limit(len(names) + math.prod(map(len, parts)), text)
            names += map("".join, product(*parts))
            parts = []
        elif piece.startswith("["):
            parts.append(_numbers(piece, text))
        else:
            parts.append([piece.strip()])
    return names


def _numbers(bracket: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in bracket.strip("[]").split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not found:
            raise ValueError(f"{text!r} is no list of nodes: {bracket!r} is not like [1-3,7].")
        first, last = found[1], found[2] or found[1]
        _limit(len(numbers) + int(last) - int(first) + 1, text)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    if not numbers:
        raise ValueError(f"{text!r} is no list of nodes: {bracket!r} counts down.")
    return numbers


def _limit(names: int, text: str) -> None:
    if names > MOST:
        raise ValueError(f"{text!r} names more than {MOST:,} nodes: is there a digit too many?")
