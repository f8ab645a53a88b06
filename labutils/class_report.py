"""``labutils class-report folder``: how far a class has come, from its executed notebooks.

A student is a folder below the one that is named, also an empty one, or a notebook that lies in it
directly.  What counts is what the outputs say, whatever the files are called; a notebook that
cannot be read is a line in the report, and stops nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils import folders, notebooks, outcome, pages
from labutils.grading import SOLVED, UNSOLVED, WRONG

_EXERCISE = re.compile(r"@lab\.exercise\(\s*[\"'](\w+)[\"']")
_MARKS = {SOLVED: "✔", WRONG: "✘ wrong", UNSOLVED: "○ open", "": ""}
_ORDER = ("", UNSOLVED, WRONG, SOLVED)  # of two verdicts on one exercise, the better one counts


@dataclass
class Student:
    """What all notebooks of one student say together."""

    name: str
    exercises: dict[str, str] = field(default_factory=dict)
    hints: int = 0
    solutions: int = 0
    """Exercises whose solution was looked at."""
    errors: int = 0
    executed: int = 0
    cells: int = 0
    seconds: float = 0.0
    notebooks: int = 0
    notes: list[str] = field(default_factory=list)
    is_file: bool = False
    """No student, but a notebook beside the students' folders that cannot be read."""

    def count(self, state: str) -> int:
        return sum(found == state for found in self.exercises.values())


def gather(folder: Path, out: Path | None = None) -> list[Student]:
    """Read every notebook below a folder; students in alphabetical order.

    ``out``, where the report itself goes, is nobody's folder.
    """
    inside = (path.relative_to(folder) for path in folder.rglob("*.ipynb") if path.is_file())
    paths = sorted(path for path in inside if not any(map(_hidden, path.parts)))
    if not paths:
        raise ValueError(f"There is no notebook in {folder}; name the folder of the class.")
    own = (out or folder).resolve()
    students = {
        name: Student(name) for path in folder.iterdir()
        if path.is_dir() and path.resolve() != own and not _hidden(name := path.name)
    }  # fmt: skip
    in_folders = any(len(path.parts) > 1 for path in paths)
    seen: dict[str, str] = {}
    for path in paths:
        name = path.parts[0] if len(path.parts) > 1 else _whose(path.stem)
        student = students.setdefault(name, Student(name, is_file=in_folders))
        student.notebooks += 1
        if _read(folder / path, str(path), student, seen):
            student.is_file = False
    for student in students.values():
        if not student.notebooks:
            student.notes.append("no notebook")
    return sorted(students.values(), key=lambda student: student.name.lower())


def _hidden(name: str) -> bool:
    """What programs leave beside people's files: .ipynb_checkpoints, __MACOSX."""
    return name.startswith((".", "__"))


def _whose(stem: str) -> str:
    """``kim`` of ``02_dataparallel_kim``; any other name is the student's as it is."""
    with contextlib.suppress(ValueError):
        for lab in folders.solutions_folder().parent.glob("[0-9][0-9]_*.ipynb"):
            rest = stem.removeprefix(lab.stem)
            if rest != stem and rest[:1] in tuple("_-. ") and rest[1:]:
                return rest[1:]
    return stem


def _count(students: Sequence[Student]) -> int:
    return sum(not student.is_file for student in students)


def exercises_of(students: Sequence[Student]) -> list[str]:
    """All exercises that occur, in the order in which they first do."""
    return list(dict.fromkeys(name for student in students for name in student.exercises))


def to_csv(students: Sequence[Student]) -> str:
    """One line a student; the last columns are the exercises."""
    names = exercises_of(students)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_HEAD, *names])
    for student in students:
        states = [student.exercises.get(name, "") for name in names]
        writer.writerow(map(_harmless, [*_columns(student), *states]))
    return text.getvalue()


def to_html(students: Sequence[Student]) -> str:
    """The same as a page, and how many have solved each exercise."""
    names = exercises_of(students)
    rows = []
    for student in students:
        states = [_MARKS.get(student.exercises.get(name, ""), "?") for name in names]
        rows.append([html.escape(str(cell)) for cell in (*_columns(student), *states)])
    solved = [sum(s.exercises.get(name) == SOLVED for s in students) for name in names]
    rows.append(["<b>solved by</b>", *[""] * (len(_HEAD) - 1), *map(str, solved)])
    title = f"{_count(students)} students, {len(names)} exercises"
    return pages.page(title, pages.table([*_HEAD, *names], rows), _LEGEND)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils class-report``."""
    parser.add_argument("folder", type=Path, help="a folder for each student, or their notebooks")
    parser.add_argument("--out", type=Path, help="folder for class.html and class.csv (default: "
                        "the class's own)")  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Write ``class.html`` and ``class.csv``; 1 if a notebook could not be read."""
    out = arguments.out or arguments.folder
    students = gather(arguments.folder, out)
    out.mkdir(parents=True, exist_ok=True)
    # A spreadsheet takes names for UTF-8 only with a byte order mark.
    notebooks.write_whole(out / "class.csv", "\ufeff" + to_csv(students))
    notebooks.write_whole(out / "class.html", to_html(students))
    print(f"{_count(students)} students: {out / 'class.html'}, {out / 'class.csv'}")
    unread = [f"{s.name}: {note}" for s in students for note in s.notes if _UNREAD in note]
    print(*unread, sep="\n", end="\n" if unread else "")
    return int(bool(unread))


_HEAD = ("student", "solved", "wrong", "open", "hints", "solutions shown", "errors", "cells run",
         "minutes", "notebooks", "notes")  # fmt: skip
_UNREAD = "cannot be read"
_LEGEND = """<p>✔ solved; ✘ the last answer is wrong; ○ not begun; empty: never checked in any
notebook. Hints, solutions and minutes are as far as the notebooks keep them: minutes need
JupyterLab's cell timing, or papermill. "errors" counts cells that ended in one.</p>"""


def _read(path: Path, shown: str, student: Student, seen: dict[str, str]) -> bool:
    """Add one notebook to its student; False where it cannot be read."""
    import nbformat

    try:
        content = path.read_bytes()
        notebook = nbformat.reads(content.decode("utf-8"), as_version=4)
        found = outcome.read(notebook)
        set_here = _set_in(notebook)
    except Exception as error:  # whatever people hand in
        why = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        student.notes.append(f"{shown} {_UNREAD}: {why}")
        return False
    digest = hashlib.sha256(content).hexdigest()
    if digest in seen:
        student.notes.append(f"{shown} is the same file as {seen[digest]}")
    seen.setdefault(digest, shown)
    if not found.executed:
        student.notes.append(f"{shown} was not run")
    _add(student, found, set_here, shown)
    return True


def _add(student: Student, found: outcome.Outcome, set_here: set[str], shown: str) -> None:
    for name, state in found.exercises.items():
        if name not in set_here:
            student.notes.append(f"{shown} has a verdict on {name}, but not the exercise")
        elif _ORDER.index(state) >= _ORDER.index(student.exercises.get(name, "")):
            student.exercises[name] = state
    student.hints += sum(found.hints.values())
    student.solutions += len(found.solutions)
    student.errors += len(found.errors)
    student.executed += found.executed
    student.cells += found.cells
    student.seconds += found.seconds or 0.0


def _set_in(notebook: Any) -> set[str]:
    """Exercises that the notebook has a cell for."""
    code = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return {name for source in code for name in _EXERCISE.findall(source)}


def _columns(student: Student) -> list[Any]:
    minutes = f"{student.seconds / 60:.0f}" if student.seconds else ""
    return [
        f"{student.name} (file)" if student.is_file else student.name,
        student.count(SOLVED), student.count(WRONG), student.count(UNSOLVED),
        student.hints, student.solutions, student.errors, f"{student.executed} of {student.cells}",
        minutes, student.notebooks, "; ".join(student.notes),
    ]  # fmt: skip


def _harmless(cell: Any) -> str:
    """A spreadsheet runs what starts like a formula; names and notes are other people's text."""
    text = str(cell)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text
