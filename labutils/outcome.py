"""What an executed notebook says: which exercises are solved, what failed, its key figures.

Everything comes from the outputs: an exercise counts because a cell's output says so, not because
of a file's name or of code that may never have run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from labutils import notebooks
from labutils.grading import SOLVED, UNSOLVED, WRONG

_DECIDED = re.compile(r"^Exercise (\w+): (solved|not solved yet|not right yet),", re.MULTILINE)
_STATES = {"solved": SOLVED, "not solved yet": UNSOLVED, "not right yet": WRONG}


@dataclass
class Outcome:
    """One executed notebook."""

    exercises: dict[str, str] = field(default_factory=dict)
    """The last verdict on each exercise: ``solved``, ``wrong`` or ``unsolved``."""
    hints: dict[str, int] = field(default_factory=dict)
    """The most hints that were shown, by exercise."""
    solutions: list[str] = field(default_factory=list)
    """Exercises whose solution was shown."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """Key figures, see :mod:`labutils.key_figures`."""
    errors: list[str] = field(default_factory=list)
    """Messages of cells that ended in an error."""
    executed: int = 0
    """Code cells that have been run."""
    cells: int = 0
    """Code cells in all."""
    seconds: float | None = None
    """Time from the first cell's start to the last one's end, where the notebook says."""

    @property
    def solved(self) -> int:
        return sum(state == SOLVED for state in self.exercises.values())


def read(notebook: Any) -> Outcome:
    """Look through a notebook's outputs in the order in which they were made."""
    outcome = Outcome()
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    outcome.cells = len(code)
    run = [cell for cell in code if cell.get("execution_count")]
    outcome.executed = len(run)
    for cell in sorted(run, key=lambda cell: cell.execution_count):
        for output in cell.get("outputs", ()):
            _take(outcome, output)
    outcome.errors = [f"cell {number}: {text}" for number, text in notebooks.errors(notebook)]
    outcome.seconds = _seconds(run)
    return outcome


def _take(outcome: Outcome, output: Any) -> None:
    if output.output_type == "stream":
        for name, state in _DECIDED.findall(str(output.get("text", ""))):
            outcome.exercises[name] = _STATES[state]
    mark = output.get("metadata", {}).get("labutils", {})
    if "check" in mark and mark["status"] in _STATES.values():
        outcome.exercises[str(mark["check"])] = str(mark["status"])
    if "hint" in mark:
        name = str(mark["hint"])
        outcome.hints[name] = max(outcome.hints.get(name, 0), int(mark["given"]))
    if "solution" in mark and mark["solution"] not in outcome.solutions:
        outcome.solutions.append(str(mark["solution"]))
    if "figure" in mark:
        outcome.figures.append(dict(mark["figure"]))


def _seconds(cells: list[Any]) -> float | None:
    """As papermill or JupyterLab (with its cell timing switched on) have noted it."""
    times = [moment for cell in cells for moment in _moments(cell.metadata)]
    return round((max(times) - min(times)).total_seconds(), 1) if times else None


def _moments(metadata: Any) -> Iterator[datetime]:
    noted = [metadata.get("papermill", {}).get(name) for name in ("start_time", "end_time")]
    timing = metadata.get("execution", {})
    noted += [timing.get("iopub.execute_input"), timing.get("shell.execute_reply")]
    for text in filter(None, noted):
        try:
            moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
        except ValueError:
            continue
        yield moment.replace(tzinfo=None)
