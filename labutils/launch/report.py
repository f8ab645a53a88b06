"""What failed first, where, and what the others were doing: in words."""

from __future__ import annotations

import linecache
import re
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from labutils.launch.board import Last
from labutils.launch.calls import is_users

_SIGNALS = {
    "SIGKILL": "it was killed from outside; when nobody did so, the system ran out of memory",
    "SIGSEGV": "it touched memory that is not its own: a bug in compiled code, or wrong sizes",
    "SIGABRT": "compiled code gave up; tensors of different shapes in one collective do this",
    "SIGBUS": "memory could not be provided; a full or too small /dev/shm does this",
    "SIGFPE": "compiled code divided by zero",
    "SIGTERM": "it was asked to end from outside",
    "SIGINT": "it was interrupted",
    "SIGILL": "compiled code is not made for this processor",
}
_CODES = {
    0: "it ended itself without an error, before its function had returned",
    1: "it ended itself with an error",
    77: "its notebook or its starter had gone",
}
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_CELL_FILE = re.compile(r"(/[^\s:]*?ipykernel_\d+/\d+\.py|<ipython-input-[^>]*>)")


@dataclass
class Ended:
    """How a rank ended, or what it was doing when the others were stopped."""

    rank: int
    kind: str
    """"error", "died", "returned", "hangs", "interrupted" or "stopped"."""
    time_ns: int = 0
    error: dict[str, Any] = field(default_factory=dict)
    code: int = 0
    stack: list[tuple[str, int, str]] = field(default_factory=list)
    """Frames (file, line, function) of a rank that hangs or that has crashed, innermost first."""
    last: Last | None = None

    @property
    def secondary(self) -> bool:
        """Whether this probably follows from another rank's failure."""
        return self.kind == "stopped" or bool(self.error.get("secondary"))


def explain_exit(code: int) -> str:
    """An exit code or (negative) a signal, in words."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            return f"it was ended by signal {-code}"
        why = _SIGNALS.get(name, "see man 7 signal")
        return f"it was ended by {name} (signal {-code}): {why}"
    why = _CODES.get(code, "the code is its own choice")
    return f"its process ended with exit code {code}: {why}"


def first_failure(ends: list[Ended]) -> Ended | None:
    """The failure that the others follow from: causes before consequences, then by time."""
    failed = [end for end in ends if end.kind in ("error", "died")]
    first = min(failed, key=lambda end: (end.secondary, end.time_ns), default=None)
    # Of ranks that fail in the same way the lowest is named: which was faster says nothing.
    return first and min(
        [first, *(end for end in failed if _same(end, first))], key=lambda e: e.rank
    )


def parse_stack(text: str) -> list[tuple[str, int, str]]:
    """The user's thread in what faulthandler wrote last: frames, innermost first."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    for thread in reversed(threads):
        frames = [m.groups() for line in thread.splitlines() if (m := _FRAME.match(line))]
        if any(file.endswith("rank.py") and name == "_work" for file, _, name in frames):
            return [(file, int(number), name) for file, number, name in frames]
    return []


def place(filename: str, line: int) -> str:
    """``Cell In[3], line 5`` for a notebook's cell, else ``file.py, line 5``."""
    return f"{cell_name(filename)}, line {line}"


def cell_name(filename: str) -> str:
    """A cell's name as the notebook shows it."""
    try:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None and (named := shell.compile.format_code_name(filename)):
            return " ".join(named)
    except (ImportError, AttributeError):
        pass
    return filename


def readable(text: str) -> str:
    """Replace the file names of cells in a message by the cells' names."""
    return _CELL_FILE.sub(lambda match: cell_name(match[1]), text)


def report(ends: list[Ended], reason: str = "") -> str:
    """The whole story.  ``reason`` stands first where no rank failed by itself (a time limit)."""
    first = first_failure(ends)
    if reason:
        first = None
    lines = [reason] if reason else []
    if first is not None:
        lines += _failure(first)
    others = [end for end in ends if end is not first]
    same = [e for e in others if first is not None and _same(e, first)]
    if same:
        lines.append(f"\n{_ranks(same)} failed in the same way.")
    rest = [end for end in others if end not in same]
    if rest:
        lines.append(
            "\nWhat the other ranks were doing:" if first else "\nWhat the ranks were doing:"
        )
        lines += [line for end in rest for line in _other(end)]
    return "\n".join(lines)


def headline(end: Ended) -> str:
    """The failure in one line."""
    if end.kind == "died":
        return f"Rank {end.rank} died: {explain_exit(end.code)}."
    return f"Rank {end.rank} failed: {_exception_line(end.error)}"


def _failure(end: Ended) -> list[str]:
    lines = [headline(end)]
    if end.kind == "died":
        if end.stack:
            lines += ["", "It was at", *_frames(end.stack[::-1])]
        return lines + _last_call(end)
    error: dict[str, Any] | None = end.error
    while error is not None:
        lines += ["", *_frames(error["frames"])]
        lines += [f"  note: {note}" for note in error["notes"]]
        error = error["cause"]
        if error is not None:
            lines += ["", f"That came after {_exception_line(error)}"]
    return lines


def _exception_line(error: dict[str, Any]) -> str:
    if error["syntax"]:
        return readable(error["syntax"].rstrip())
    return readable(f"{error['type']}: {error['message']}".removesuffix(": "))


def _frames(frames: list[Any]) -> list[str]:
    """The user's frames with their source; what libraries did below them in one line."""
    users = [frame for frame in frames if is_users(frame[0])]
    lines = []
    for filename, number, name, *source in users:
        function = "" if name == "<module>" else f", in {name}"
        lines.append(f"  {place(filename, number)}{function}")
        text = linecache.getline(filename, number).strip() or (source[0].strip() if source else "")
        lines += [f"    {text}"] if text else []
    below = len(frames) - 1 - max((i for i, f in enumerate(frames) if is_users(f[0])), default=-1)
    if users and below and _library(frames[-1][0]) != "labutils":
        lines.append(f"  (and {below} more inside {_library(frames[-1][0])})")
    return lines


def _library(filename: str) -> str:
    parts = re.split(r"[\\/]", filename)
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py")
    return "labutils" if "labutils" in parts else "Python"


def _same(end: Ended, first: Ended) -> bool:
    if end.kind != "error" or first.kind != "error":
        return False
    if end.error["type"] == first.error["type"] == "CollectiveMismatch":
        return True
    return all(end.error[key] == first.error[key] for key in ("type", "message")) and (
        [f[:2] for f in end.error["frames"][-1:]] == [f[:2] for f in first.error["frames"][-1:]]
    )


def _ranks(ends: list[Ended]) -> str:
    numbers = [str(end.rank) for end in ends]
    return f"Rank {numbers[0]}" if len(numbers) == 1 else f"Ranks {', '.join(numbers)}"


def _other(end: Ended) -> list[str]:
    lines = [f"  rank {end.rank}: {_doing(end)}"]
    if end.kind == "hangs":
        users = [frame for frame in end.stack if is_users(frame[0])][:3]
        for filename, number, name in users:
            source = linecache.getline(filename, number).strip()
            lines.append(
                f"    at {place(filename, number)}, in {name}" + f": {source}" * bool(source)
            )
    return lines


def _doing(end: Ended) -> str:
    if end.kind == "died":
        by_torchrun = end.code == -signal.SIGTERM
        how = "was ended by torchrun because of it" if by_torchrun else explain_exit(end.code)
        return how + _last_text(end)
    if end.kind == "error" and end.error["type"] == "PeerFailed":
        return f"was stopped because of it: {readable(end.error['message'])}"
    if end.kind == "error" and end.secondary:
        return "was stopped because of it: its connection to another rank closed" + _last_text(end)
    if end.kind == "error":
        return f"raised {_exception_line(end.error)}"
    if end.kind == "returned":
        return "had finished" + _last_text(end)
    if end.kind == "interrupted":
        return "was interrupted" + _last_text(end)
    if end.last is not None and end.last.state == "waiting":
        waited = (time.monotonic_ns() - end.last.since) * 1e-9
        return f"was waiting in {end.last.text} for {waited:.1f} s, at {readable(end.last.where)}"
    return "was running" + _last_text(end)


def _last_text(end: Ended) -> str:
    if end.last is None:
        return "; it has called no collective yet"
    return f"; its last call was {end.last.text}, at {readable(end.last.where)}"


def _last_call(end: Ended) -> list[str]:
    return ["", f"Before that{_last_text(end)[1:]}"] if end.last is not None else []
