"""Judging a run: has it stalled, who hangs where, and can its ranks go on afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

from labutils.launch.board import FINISHED, Board, Last
from labutils.launch.pool import Ranks
from labutils.launch.processes import Process
from labutils.launch.report import Ended, parse_stack

_GONE_NS = 500_000_000  # what two ranks say of themselves may be that far apart in time
_STACK_S = 0.6  # how long ranks may take to write their stacks


def stalled(board: Board, running: list[int], limit_s: float, moved: float) -> str:
    """Why the run is to be stopped; "" while it gets on.

    It has stalled when a rank waits in one call for longer than ``limit_s``, or when for so long no
    rank has completed a call, ended a span, or printed something new (last at ``moved``, on the
    clock of ``time.monotonic``).
    """
    since = time.monotonic() - limit_s
    change = "a longer limit is timeout=…, or None for no limit"
    lasts = {rank: last for rank in running if (last := board.last(rank)) is not None}
    waiting = {rank: last for rank, last in lasts.items() if last.state == "waiting"}
    longest = min(waiting.values(), key=lambda last: last.since, default=None)
    if longest is not None and longest.since * 1e-9 < since:
        there = [rank for rank, last in waiting.items() if last.text == longest.text]
        away = [rank for rank in range(board.ranks) if rank not in there]
        who = f"{names(away).lower()} did not call it" if away else "they wait for each other"
        return f"{names(there)} waited more than {limit_s:g} s in {longest.text}; {who} ({change})."
    if max([moved, *(board.advanced(rank) * 1e-9 for rank in running)]) < since:
        return (
            f"Nothing moved on for {limit_s:g} s: no collective was completed, no span ended, "
            f"nothing new was printed, so the ranks were stopped ({change})."
        )
    return ""


def abandoned(board: Board, running: list[int]) -> str:
    """Why DDP's all-reduce of a bucket, in which a rank waits, can never end; "" while it can.

    Other collectives are compared across ranks before they run; these are only seen here.  A rank
    of the same DDP has finished after fewer of them.
    """
    late = time.monotonic_ns() - _GONE_NS
    for rank in running:
        last = board.last(rank)
        if last is None or not last.buckets or last.state == "done" or last.since > late:
            continue
        for other in range(board.ranks):
            ended = board.last(other) if board.state(other) == FINISHED else None
            if ended is not None and ended.buckets == last.buckets and number(ended) < number(last):
                return (
                    f"Rank {rank} waits in {last.text} for rank {other}, which has finished after "
                    f"#{number(ended)}: with DDP every rank must take the same number of steps."
                )
    return ""


def number(last: Last) -> int:
    """The number of a call among those that it is counted with."""
    found = re.search(r" #(\d+)", last.text)
    return int(found[1]) if found else 0


def names(ranks: list[int]) -> str:
    """``Rank 2`` or ``Ranks 0, 1 and 3``."""
    *most, last = map(str, ranks)
    return f"Ranks {', '.join(most)} and {last}" if most else f"Rank {last}"


def exit_code(process: Process, limit_s: float = 2.0) -> int:
    """The exit code of a process that is ending; of one that does not end, as if killed."""
    deadline = time.monotonic() + limit_s
    while (code := process.exit_code()) is None and time.monotonic() < deadline:
        time.sleep(0.002)
    if code is None:
        process.kill()
    return -signal.SIGKILL if code is None else code


def stacks(ranks: Ranks, stuck: list[int]) -> dict[int, list[tuple[str, int, str]]]:
    """Python stacks of ranks that are still at work, innermost frame first.

    The ranks' fault handlers write them, so this works also where the interpreter is blocked.
    """
    ends = {rank: _size(ranks, rank) for rank in stuck}
    for rank in stuck:
        if hasattr(signal, "SIGUSR1"):
            ranks.processes[rank].kill(signal.SIGUSR1)
        else:
            with contextlib.suppress(OSError):
                ranks.processes[rank].output.send(b"S")
    deadline = time.monotonic() + _STACK_S
    found: dict[int, list[tuple[str, int, str]]] = {rank: [] for rank in stuck}
    while time.monotonic() < deadline and not all(found.values()):
        time.sleep(0.02)
        for rank in stuck:
            found[rank] = found[rank] or parse_stack(_read(ranks, rank, ends[rank]))
    return found


def crash_stack(ranks: Ranks, rank: int) -> list[tuple[str, int, str]]:
    """The stack that a rank's fault handler wrote when it crashed."""
    return parse_stack(_read(ranks, rank, 0))


def _size(ranks: Ranks, rank: int) -> int:
    return os.fstat(ranks.crash[rank].fileno()).st_size


def _read(ranks: Ranks, rank: int, start: int) -> str:
    file = ranks.crash[rank]
    file.seek(start)
    return file.read().decode(errors="replace")


def in_step(members: list[int], ends: dict[int, Ended], counts: dict[int, dict[str, int]]) -> bool:
    """Whether the ranks are still in step, so that a failed cell need not cost their variables.

    All must have come back, and have made the same number of calls in each group, and as many
    receives as there were sends.
    """
    back = all(ends[rank].kind in ("returned", "error", "interrupted") for rank in members)
    return back and all(
        _answered(name, count, rank, counts)
        for rank in members
        for name, count in counts.get(rank, {"unknown": 1}).items()
    )


def _answered(name: str, count: int, rank: int, counts: dict[int, dict[str, int]]) -> bool:
    if name == "unknown":
        return False
    what, whom, *_ = name.split(" ")
    if what in ("send", "recv"):
        answer = f"{'recv' if what == 'send' else 'send'} {rank}"
        return counts.get(int(whom), {}).get(answer, 0) == count
    return all(counts.get(int(member), {}).get(name, 0) == count for member in whom.split(","))
