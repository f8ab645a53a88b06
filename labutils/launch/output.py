"""What the ranks print: whole lines, marked by rank, into the cell that launched them."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

COLOURS = (34, 32, 35, 36, 33, 94, 92, 95)
"""ANSI colours of ranks 0, 1, 2 …; red is left to errors."""

SHOWN_LINES = 1000
"""First lines of one rank that a cell shows; after that only the last few, at the end."""

TAIL_LINES = 10

OLD_LINES = 100
"""Lines in a row, all among its last few different ones, after which a rank says nothing new."""

KEPT_BYTES = 64 << 20
"""Bytes of one rank's output that are kept in ``run.logs``."""


def prefix(rank: int, colour: bool = True) -> str:
    """``[rank 2] ``, in the rank's colour."""
    text = f"[rank {rank}]"
    return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m " if colour else text + " "


def to_cell(text: str) -> None:
    """Print into the cell that is running."""
    sys.stdout.write(text)
    sys.stdout.flush()


class Log:
    """Collects the output of one rank, and passes whole lines on."""

    def __init__(self, rank: int, show: Callable[[str], None], colour: bool = True) -> None:
        self._prefix, self._show = prefix(rank, colour), show
        self._rank = rank
        self._rest = b""
        self._kept: list[str] = []
        self._kept_bytes = self._lines = 0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._different: deque[str] = deque(maxlen=TAIL_LINES)
        self._old = 0

    @property
    def repeats(self) -> bool:
        """Whether the rank only prints the same few lines again and again."""
        return self._old > OLD_LINES

    def feed(self, data: bytes) -> None:
        """Take what has come out of the rank."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 1 << 20:  # a line that never ends
            whole.append(self._rest)
            self._rest = b""
        self._take([_last_state(line) for line in whole])

    def finish(self) -> None:
        """Pass on the line that was begun, and the end of an output that was cut short."""
        if self._rest:
            line, self._rest = self._rest, b""
            self._take([_last_state(line)])
        hidden = self._lines - SHOWN_LINES
        if hidden > 0 and self._tail:
            skipped = hidden - len(self._tail)
            lines = [_only_in_logs(skipped, self._rank)] if skipped else []
            self._show("".join(f"{self._prefix}{line}\n" for line in [*lines, *self._tail]))
            self._tail.clear()

    @property
    def text(self) -> str:
        """All that the rank has printed."""
        return "".join(self._kept)

    def _take(self, lines: list[str]) -> None:
        if not lines:
            return
        room = max(0, SHOWN_LINES - self._lines)
        self._lines += len(lines)
        self._notice_new(lines)
        if room:
            self._show("".join(f"{self._prefix}{line}\n" for line in lines[:room]))
        self._tail.extend(lines[room:][-TAIL_LINES:])
        self._keep("".join(f"{line}\n" for line in lines))

    def _notice_new(self, lines: list[str]) -> None:
        for line in lines:
            if line in self._different:
                self._old += 1
            else:
                self._different.append(line)
                self._old = 0

    def _keep(self, text: str) -> None:
        if self._kept_bytes < KEPT_BYTES:
            self._kept.append(text)
            self._kept_bytes += len(text)
            if self._kept_bytes >= KEPT_BYTES:
                self._kept.append("… the rest was not kept\n")


def _last_state(line: bytes) -> str:
    """The line as a terminal would show it in the end: progress bars write over themselves."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")


def in_rank_order(logs: list[str], colour: bool) -> str:
    """The output, rank by rank: the same text however the ranks were scheduled."""
    return "".join(
        f"{prefix(rank, colour)}{line}\n"
        for rank, log in enumerate(logs)
        for line in _without_middle(rank, log.splitlines())
    )


def _without_middle(rank: int, lines: list[str]) -> list[str]:
    skipped = len(lines) - SHOWN_LINES - TAIL_LINES
    if skipped <= 0:
        return lines
    return [*lines[:SHOWN_LINES], _only_in_logs(skipped, rank), *lines[-TAIL_LINES:]]


def _only_in_logs(skipped: int, rank: int) -> str:
    return f"… {skipped} lines are only in run.logs[{rank}] …"


def coloured() -> bool:
    """Whether colours mean anything where the output goes."""
    return in_notebook() or sys.stdout.isatty()


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def shower(block: bool) -> Callable[[str], None]:
    """What prints for a run: the cell itself, or for one in the background a display of its own."""
    return to_cell if block or not in_notebook() else Background()


class Background:
    """Output of a run that goes on after its cell: a display, updated a few times a second."""

    SHOWN = 200  # lines
    PAUSE_S = 0.25
    RUNNING = "Running in the background. To end it: run.stop(), run being what this call returned."

    def __init__(self) -> None:
        from IPython.display import display

        self._lines: deque[str] = deque(maxlen=self.SHOWN)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._handle = display({"text/plain": self.RUNNING}, raw=True, display_id=True)

    def __call__(self, text: str) -> None:
        """Show ``text`` soon, together with what else comes until then."""
        with self._lock:
            self._lines.extend(text.splitlines())
            if self._timer is None:
                self._timer = threading.Timer(self.PAUSE_S, self._show, [self.RUNNING])
                self._timer.daemon = True
                self._timer.start()

    def finish(self) -> None:
        """Show what there is now; nothing more will come."""
        self._show()

    def _show(self, *first: str) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            elif first:  # it has finished meanwhile
                return
            self._timer = None
            text = "\n".join([*first, *self._lines]) or "Ran in the background."
            self._handle.update({"text/plain": text}, raw=True)
