"""Exercises: the learner's answer is used where it is right, the reference where it is not yet.

In a notebook::

    @lab.exercise("ring_all_reduce")
    def ring_all_reduce(chunks): ...      # to be filled in

    lab.check("ring_all_reduce")          # yours beside the expected, on the smallest failing case
    lab.hint("ring_all_reduce")           # one step further at each call
    lab.solution("ring_all_reduce")

The reference is ``labs/solutions/<name>.py``, a plain module: a function (or class) ``<name>``;
``cases(rng)``, which yields tuples of arguments; ``hints``, a list of sentences; and where needed
``compare``, ``run`` and ``lab`` (see :class:`labutils.grading.Reference`).
"""

from __future__ import annotations

import html
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from labutils.answer_types import as_announced
from labutils.folders import progress_folder, solutions_folder
from labutils.grading import SOLVED, UNSOLVED, Failure, Grade, Reference, grade

Answer = TypeVar("Answer", bound=Callable[..., Any])

_answers: dict[str, Callable[..., Any]] = {}
_hints_given: dict[str, int] = {}
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
_LONGEST = 600


class Note:
    """A text for the reader of a notebook, as plain text and as HTML."""

    def __init__(
        self,
        title: str,
        rows: Sequence[tuple[str, str]] = (),
        mark: Mapping[str, Any] | None = None,
    ) -> None:
        self.title = title
        self.rows = rows
        """(label, text) below the title; an empty label for a text that stands alone."""
        self.mark = mark
        """What programs that read the executed notebook find in the output's metadata."""

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"labutils": dict(self.mark)} if self.mark else {}

    def __repr__(self) -> str:
        width = max((len(label) for label, _ in self.rows), default=0)
        indent = " " * (width + 4) if width else "  "
        lines = [self.title]
        for label, text in self.rows:
            block = textwrap.indent(text, indent)
            lines.append(f"  {label:<{width}}  {block.lstrip(' ')}" if width else block)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left;vertical-align:top"><b>{html.escape(label)}</b></td>'
            f'<td style="text-align:left"><pre style="margin:0">{html.escape(text)}</pre></td></tr>'
            for label, text in self.rows
        )
        table = f"<table>{rows}</table>" if rows else ""
        return f"<div><p><b>{html.escape(self.title)}</b></p>{table}</div>"


class Verdict(Note):
    """What :func:`check` found; true if the exercise is solved."""

    def __init__(self, name: str, grade: Grade, reference: Reference) -> None:
        mark = {"check": name, "status": grade.status}
        super().__init__(_headline(name, grade), _failure_rows(grade, reference), mark)
        self.name = name
        self.grade = grade

    def __bool__(self) -> bool:
        return self.grade.status == SOLVED


def exercise(name: str) -> Callable[[Answer], Answer]:
    """Decorate the learner's function or class.

    It is checked at once.  If it is right, it stays, and its results come in the type that the
    exercise announces (see :mod:`labutils.answer_types`); if it is a stub or wrong, the notebook
    says so and goes on with the reference under the same name.  So *Run All* reaches the end.
    """
    if callable(name):
        raise TypeError('Write the name of the exercise in brackets: @lab.exercise("its_name").')
    reference = _load(name)

    def decide(answer: Answer) -> Answer:
        _answers[name] = answer
        found = _grade(name, reference)
        if found.status == SOLVED:
            print(f"Exercise {name}: solved, the cells below use your answer.")
            return as_announced(answer, reference.function)
        state = "not solved yet" if found.status == UNSOLVED else "not right yet"
        print(f"Exercise {name}: {state}, the cells below use the reference solution.")
        return reference.function  # type: ignore[return-value]

    return decide


def check(name: str) -> Verdict:
    """Run the latest answer on random inputs and show it beside the expected result."""
    reference = _load(name)
    if name not in _answers:
        raise ValueError(f"Run the cell with @lab.exercise({name!r}) before checking it.")
    return Verdict(name, _grade(name, reference), reference)


def hint(name: str) -> Note:
    """The hints so far and one more at each call."""
    hints = _load(name).hints
    given = _hints_given[name] = min(_hints_given.get(name, 0) + 1, len(hints))
    rows = [(f"{number}.", text) for number, text in enumerate(hints[:given], 1)]
    if given == len(hints):
        rows.append(("", f"That was the last hint; lab.solution({name!r}) shows the solution."))
    mark = {"hint": name, "given": given}
    return Note(f"{name}: hint {given} of {len(hints)}", rows, mark)


def solution(name: str) -> Note:
    """The reference solution's source."""
    source = inspect.getsource(_load(name).function)
    return Note(f"{name}: one solution", [("", source.rstrip())], {"solution": name})


def progress() -> Note:
    """Which exercises of all labs are solved, as far as this user's progress was kept."""
    references = sorted(map(_load, names()), key=lambda ref: (ref.lab, ref.name))
    rows = [(ref.name, _state(ref.name)) for ref in references]
    solved = sum(state == SOLVED for _, state in rows)
    return Note(f"{solved} of {len(rows)} exercises solved", rows)


def names() -> list[str]:
    """The names of all exercises."""
    return sorted(p.stem for p in solutions_folder().glob("*.py") if not p.stem.startswith("_"))


def _grade(name: str, reference: Reference) -> Grade:
    found = grade(_answers[name], reference)
    if found.status != UNSOLVED:
        _keep(name, found.status)
    return found


def _keep(name: str, status: str) -> None:
    """Note progress as an empty file: appearing is atomic, so several kernels need no lock."""
    try:
        progress_folder().mkdir(parents=True, exist_ok=True)
        (progress_folder() / f"{name}.{SOLVED if status == SOLVED else 'tried'}").touch()
    except OSError as error:
        print(f"(Progress was not kept: {error.strerror} in {progress_folder()}.)")


def _state(name: str) -> str:
    for state in (SOLVED, "tried"):
        if (progress_folder() / f"{name}.{state}").exists():
            return state
    return "open"


def _load(name: str) -> Reference:
    path = solutions_folder() / f"{name}.py"
    if not isinstance(name, str):
        raise TypeError(f"An exercise is named by a text such as 'ring_bytes', not {name!r}.")
    if name not in (known := names()):
        near = get_close_matches(name, known, 3) or get_close_matches(name, known, 3, cutoff=0)
        said = f"the nearest are {', '.join(near)}." if near else f"{path.parent} holds none."
        raise ValueError(f"There is no exercise {name!r}; {said}")
    module = _import(path)
    return Reference(
        name,
        getattr(module, name),
        module.cases,
        list(getattr(module, "hints", ())),
        getattr(module, "compare", None),
        getattr(module, "run", None),
        str(getattr(module, "lab", "")),
    )


def _import(path: Path) -> Any:
    """Import a solution; ranks cannot, so its functions travel to them by value."""
    import cloudpickle

    name = f"labutils_solution_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module


def _headline(name: str, grade: Grade) -> str:
    if grade.status == SOLVED:
        return f"✔ {name}: solved, right in all {grade.cases} cases"
    if grade.status == UNSOLVED:
        return f"○ {name}: not solved yet: {grade.reason} (lab.hint({name!r}) helps)"
    return f"✘ {name}: wrong in {len(grade.failures)} of {grade.cases} cases; the smallest:"


def _failure_rows(grade: Grade, reference: Reference) -> list[tuple[str, str]]:
    if not grade.failures:
        return []
    failure = grade.smallest
    rows = [("input", _arguments(failure, reference))]
    rows += [
        ("yours", failure.error or _show(failure.yours)),
        ("expected", _show(failure.expected)),
    ]
    rows += [("difference", failure.reason)] if failure.reason else []
    return rows + ([("printed", _cut(failure.printed.rstrip()))] if failure.printed else [])


def _arguments(failure: Failure, reference: Reference) -> str:
    takes = [*inspect.signature(reference.run or reference.function).parameters]
    names = takes[1:] if reference.run else takes
    names += [f"argument {number}" for number in range(len(names) + 1, len(failure.case) + 1)]
    return "\n".join(f"{name} = {_show(value)}" for name, value in zip(names, failure.case))


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"a {type(value).__name__} that cannot be shown: {type(error).__name__}"
    return _cut(_ADDRESS.sub("at 0x...", text))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
