"""A progress bar that leaves one line, the same every time, in whatever shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
PERIOD_S = 0.1
"""Time between two updates of the bar."""
_CELLS = 30


def bar(items: Sequence[Item], doing: str, done: str) -> Iterator[Item]:
    """Yield ``items`` while a bar says how far one is; ``done`` is the line that stays.

    In a notebook the bar is replaced in place, in a terminal it is overwritten; where the output
    goes to a file nothing but the last line is written.
    """
    line = _line()
    shown = float("-inf")
    for number, item in enumerate(items):
        if time.monotonic() - shown > PERIOD_S:
            shown = time.monotonic()
            filled = _CELLS * number // len(items)
            cells = "█" * filled + "░" * (_CELLS - filled)
            line.show(f"{doing} {cells} {number}/{len(items)}")
        yield item
    line.close(done)


class _Plain:
    """Neither a terminal nor a notebook."""

    def show(self, text: str) -> None:
        """Say nothing yet."""

    def close(self, text: str) -> None:
        print(text)


class _Terminal(_Plain):
    def show(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)

    def close(self, text: str) -> None:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        print(text)


class _Notebook(_Plain):
    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display(_Text(""), display_id=True)

    def show(self, text: str) -> None:
        self._handle.update(_Text(text))

    close = show


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _line() -> _Plain:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None and hasattr(shell, "kernel"):
        return _Notebook()
    return _Terminal() if sys.stderr.isatty() else _Plain()
