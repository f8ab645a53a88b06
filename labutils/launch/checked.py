"""Checked mode: compare each collective across ranks before it runs.

Without it, ranks that disagree abort, hang or silently mix up tensors.  Here every rank posts what
it is about to call and waits until the others have done so; a difference in operation, dtype,
shape, reduction or root is an error on every rank, with each rank's line.  The same call made from
different lines is only suspicious (swapped tensors look like this), so it is a warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from labutils.launch.board import ABSENT, FAILED, FINISHED, GROUPS, Board
from labutils.launch.calls import Call

_PLACES = 3  # lines of the user's that are shown of a call: its own, and its callers'


class CollectiveMismatch(RuntimeError):
    """Ranks call different collectives, or one of them will not call at all."""


class PeerFailed(RuntimeError):
    """A collective cannot be made because another rank has failed."""

    secondary = True


class Checker:
    """Compares the calls of this rank with those of the others, through the board."""

    def __init__(self, board: Board, rank: int, warn: Callable[[str], None]) -> None:
        self.board, self.rank, self.warn = board, rank, warn
        self.epoch = 0
        self.seen: set[tuple[str, ...]] = set()

    def new_epoch(self, epoch: int) -> None:
        """A new cell or run begins: calls are counted from one again."""
        self.epoch = epoch

    def compare(self, call: Call) -> float:
        """Wait for the group's other ranks; returns the seconds waited.

        Raises :class:`CollectiveMismatch` where they disagree.
        """
        if not call.group.isdigit() or int(call.group) >= GROUPS or len(call.members) < 2:
            return 0.0
        start = time.monotonic()
        group, key = int(call.group), (self.epoch << 32) | call.sequence
        mine = (call.comparable, str(call.chain), call.text, *call.trail[:_PLACES])
        self.board.post(group, key, "\0".join(mine).encode())
        posted, spins = {self.rank: list(mine)}, 0
        while missing := [rank for rank in call.members if rank not in posted]:
            for rank in missing:
                self._look(call, rank, group, key, posted)
            if len({fields[0] for fields in posted.values()}) > 1:
                raise CollectiveMismatch(_disagreement(posted, len(call.members)))
            spins += 1
            # First only let the others run; who waits for long should cost them nothing.
            time.sleep(0 if spins < 50 else 1e-4 if spins < 2000 else 1e-3)
        self._compare_lines(call, posted)
        return time.monotonic() - start

    def _look(
        self, call: Call, rank: int, group: int, key: int, posted: dict[int, list[str]]
    ) -> None:
        state = self.board.state(rank)  # read first: it may post and finish while we look
        data = self.board.posted(rank, group, key)
        if data is not None:
            posted[rank] = data.decode(errors="replace").split("\0")
        elif state == FAILED:
            raise PeerFailed(f"{call.text} at {call.where} waited for rank {rank}")
        elif state in (FINISHED, ABSENT):
            raise CollectiveMismatch(self._never(call, rank))

    def _never(self, call: Call, rank: int) -> str:
        state = self.board.state(rank)
        last = self.board.last(rank)
        why = "has already finished" if state == FINISHED else "does not take part in this cell"
        if last is not None:
            why += f" (its last call was {last.text} at {last.where})"
        return (
            f"{call.text} at {call.where} waits for rank {rank}, which {why}; "
            "every rank of the group must make the call."
        )

    def _compare_lines(self, call: Call, posted: dict[int, list[str]]) -> None:
        """Warn when the same call comes from different lines."""
        if call.op in ("barrier", "monitored_barrier"):
            return
        # With a root, one branch for the root and another for the rest is the usual way to write.
        alike = {r: fields for r, fields in posted.items() if r != call.root}
        if len({fields[1] for fields in alike.values()}) < 2 or self.rank != min(alike):
            return
        places = tuple(sorted({fields[1] for fields in alike.values()}))
        if places in self.seen:
            return
        self.seen.add(places)
        self.warn(
            "the ranks make this call from different places, so they may mix up tensors:\n"
            + _table(alike)
        )


def _disagreement(posted: dict[int, list[str]], size: int) -> str:
    rest = "" if len(posted) == size else "\n  (the other ranks have not called yet)"
    return f"the ranks do not make the same call:\n{_table(posted)}{rest}"


def _table(posted: dict[int, list[str]]) -> str:
    width = max(len(fields[2]) for fields in posted.values())
    # Where the ranks call from the same line, the callers of that line tell them apart.
    alike = len({tuple(fields[3:4]) for fields in posted.values()}) == 1
    lines = []
    for rank, (_, _, text, *places) in sorted(posted.items()):
        where = ", called from ".join(places if alike else places[:1]) or "torch"
        lines.append(f"  rank {rank}: {text:<{width}}  at {where}")
    return "\n".join(lines)
