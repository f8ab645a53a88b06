"""What happened in a rehearsal: a job's rounds between restarts, what was lost, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from labutils.figures import TraceFigure

STEP = re.compile(r"step (\d+)\b")
"""How a line of rank 0 begins that says: this step is done."""

RESUMED = re.compile(r"\bresumed at step (\d+)\b")
"""What rank 0 says when it goes on from a checkpoint of that step."""

_FAULT = re.compile(r"(rank|node) (\d+) (dies|joins)")


class Fault(NamedTuple):
    """Something that is to happen once rank 0 has done a step."""

    what: str
    number: int
    does: str
    step: int

    def __str__(self) -> str:
        return f"{self.what} {self.number} {self.does}"


class Place(NamedTuple):
    """Where a rank runs."""

    node: int
    local_rank: int


@dataclass
class Round:
    """One start of all ranks, until the next."""

    world_size: int
    places: dict[int, Place] = field(default_factory=dict)
    """Where each rank runs."""
    start: int = 0
    """The step that it went on from."""
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds since the rehearsal's start at which each step was done."""
    end: str = ""
    """What ended it, in a sentence; "" for the last one, which came to its end."""

    @property
    def nodes(self) -> list[int]:
        return sorted({place.node for place in self.places.values()})


class RehearsalFailed(RuntimeError):
    """The job did not come to its end; ``rehearsal`` has what happened until then."""

    def __init__(self, message: str, rehearsal: Rehearsal) -> None:
        super().__init__(message)
        self.rehearsal = rehearsal

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m{type(self).__name__}: {self}\x1b[0m"]


class Rehearsal:
    """What ``lab.rehearse`` returns."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        """The command of each node."""
        self.rounds: list[Round] = []
        self.printed: list[tuple[Place, int, str]] = []
        """(place, rank, line) of everything that ranks have printed."""
        self.moments: list[tuple[float, str]] = []
        """(seconds since the start, name) of each fault."""
        self.missed: list[Fault] = []
        """Faults whose step never came."""

    @property
    def lost(self) -> list[int]:
        """For each restart, the number of steps that had to be done again."""
        return lost_steps(self.rounds)

    def figure(self) -> TraceFigure:
        """The steps over time, with the faults."""
        return figure(self.rounds, self.moments)

    def __repr__(self) -> str:
        missed = [
            f"'{fault}' did not happen: rank 0 printed no line 'step {fault.step} …'."
            for fault in self.missed
        ]
        return "\n".join([story(self.rounds), *missed])


def faults(asked: Mapping[str, int], nodes: int) -> list[Fault]:
    """``{"rank 1 dies": 8}`` in the order of the steps.  Raises ValueError for anything else."""
    found = []
    for text, step in asked.items():
        parts = _FAULT.fullmatch(text)
        if not parts or (parts[1] == "rank" and parts[3] == "joins"):
            raise ValueError(
                f"{text!r} is no fault: write 'rank 1 dies', 'node 1 dies' or 'node 1 joins', each "
                "with the step after which it comes."
            )
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ValueError(f"{text!r} needs a step from 1 on, not {step!r}.")
        if parts[1] == "node" and int(parts[2]) >= nodes:
            raise ValueError(f"{text!r}: the nodes are 0 to {nodes - 1}.")
        found.append(Fault(parts[1], int(parts[2]), parts[3], step))
    return sorted(found, key=lambda fault: fault.step)


def lost_steps(rounds: Sequence[Round]) -> list[int]:
    """For each restart, how many steps had been done since the checkpoint: they are done again."""
    return [sum(step > after.start for step in before.steps) for before, after in pairwise(rounds)]


def story(rounds: Sequence[Round]) -> str:
    """What happened, one sentence for each start and each end."""
    lines = []
    lost = [*lost_steps(rounds), 0]
    for number, (this, cost) in enumerate(zip(rounds, lost), 1):
        lines.append(f"Round {number}: {_where(this)}; {_from(this)}{_span(this)}.")
        if this.end:
            lines.append(f"  {this.end} {_cost(this, cost, rounds[number : number + 1])}")
            lines += [f"  {text}" for text in _renumbered(this, rounds[number : number + 1])]
    done = sum(len(this.steps) for this in rounds)
    twice = done - len({step for this in rounds for step in this.steps})
    return "\n".join([*lines, f"{done} steps were computed, {twice} of them again."])


def _where(this: Round) -> str:
    ranks = "1 rank" if this.world_size == 1 else f"{this.world_size} ranks"
    return f"{ranks} on {_names('node', this.nodes)}"


def _from(this: Round) -> str:
    return f"from the checkpoint of step {this.start}, " if this.start else "from the beginning, "


def _span(this: Round) -> str:
    if not this.steps:
        return "no step was done"
    first, last = this.steps[0], this.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _cost(this: Round, lost: int, after: Sequence[Round]) -> str:
    if not after:
        return ""
    if not lost:
        return "Nothing was lost."
    steps = [step for step in this.steps if step > after[0].start]
    return f"Lost: {_names('step', steps)}, done since the checkpoint of step {after[0].start}."


def _renumbered(this: Round, after: Sequence[Round]) -> list[str]:
    """Ranks that have another number now, node by node."""
    if not after:
        return []
    before = {place: rank for rank, place in this.places.items()}
    now = {place: rank for rank, place in after[0].places.items()}
    moved = [p for p in sorted(now) if p in before and before[p] != now[p]]
    return [f"Rank {before[p]} (node {p.node}) is rank {now[p]} now." for p in moved]


def _names(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {listed(numbers)}"


def listed(numbers: Sequence[int]) -> str:
    """``0, 1 and 3``."""
    *most, last = map(str, numbers or "?")
    return f"{', '.join(most)} and {last}" if most else last


def figure(rounds: Iterable[Round], moments: Sequence[tuple[float, str]]) -> TraceFigure:
    """Steps over time, one colour a round, with the faults.

    Args:
        moments: seconds at which each fault came, and its name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from labutils.figures import FAINT, TEXT, WIDTH, TraceFigure
    from labutils.holdings import PALETTE

    made = TraceFigure(figsize=(WIDTH, 3.2), facecolor="white")
    FigureCanvasAgg(made)
    made.description = "steps of a rehearsed job over time, with its faults"
    axes = made.add_axes((0.08, 0.16, 0.9, 0.7))
    colours, marks = (PALETTE[5], PALETTE[1], PALETTE[2], PALETTE[3]), "osD^v"
    for number, this in enumerate(rounds):
        label = f"round {number + 1}: {_where(this)}"
        axes.plot(this.times, this.steps, marks[number % len(marks)] + "-", markersize=4,
                  linewidth=1, color=colours[number % len(colours)], label=label)  # fmt: skip
    for seconds, name in moments:
        axes.axvline(seconds, color="#D55E00", linewidth=1, linestyle="--")
        axes.annotate(name, (seconds, 0), (2, 3), xycoords=axes.get_xaxis_transform(), va="bottom",
                      textcoords="offset points", fontsize=8, color="#D55E00", rotation=90,
                      ha="left")  # fmt: skip
    axes.set_xlabel("time [s]", fontsize=8.5, color=TEXT)
    axes.set_ylabel("step that rank 0 has done", fontsize=8.5, color=TEXT)
    axes.set_title("rehearsed job · measured · processes of this machine", fontsize=9, color=TEXT)
    axes.tick_params(labelsize=8, colors=TEXT, color=FAINT)
    axes.grid(color="#E3E6EA", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, framealpha=0.9, edgecolor="none", labelcolor=TEXT, loc="upper left")
    return made
