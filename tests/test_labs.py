"""Every lab: what it stores, nbval against its stored outputs, papermill on each number of GPUs."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from labutils import notebooks
from tests import lab_rules, notebook_maker
from tests.test_answer_types import as_tensors_and_tuples

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "labs"
LABS = sorted(FOLDER.glob("*.ipynb"))
CELL_TIMEOUT_S = 300
LAB_TIMEOUT_S = 1200

IMPORTS = """
import functools
from typing import Any

import torch

from labutils import exercises

"""
ANSWER = """
reference = exercises._load("NAME").function


@lab.exercise("NAME")
@functools.wraps(reference)
def NAME(*args, reference=reference, **kwargs):
    return as_tensors_and_tuples(reference(*args, **kwargs))
"""

each_lab = pytest.mark.parametrize("lab", LABS, ids=[path.stem for path in LABS])


def test_there_are_labs() -> None:
    assert LABS, f"there is no notebook in {FOLDER}, so nothing below tests anything"


@each_lab
def test_rules(lab: Path) -> None:
    notebook = nbformat.read(lab, as_version=4)
    nbformat.validate(notebook)
    assert lab_rules.broken_rules(notebook, socket.gethostname()) == []


def test_every_exercise_has_a_solution_and_every_solution_an_exercise() -> None:
    solved = {path.stem for path in (FOLDER / "solutions").glob("[!_]*.py")}
    per_lab = [lab_rules.exercises(nbformat.read(lab, as_version=4)) for lab in LABS]
    assert set().union(*per_lab) == solved


@each_lab
def test_nbval(lab: Path) -> None:
    done = nbval(lab)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.full
@each_lab
@pytest.mark.parametrize(("gpus", "solved"), [(1, True), *((n, False) for n in (1, 2, 3, 4, 8))])
def test_papermill(
    lab: Path, gpus: int, solved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path / "data"))
    target = tmp_path / lab.name
    exercises = lab_rules.exercises(nbformat.read(lab, as_version=4))
    if solved:
        lab = solve(lab, tmp_path / f"solved_{lab.name}")
    papermill.execute_notebook(
        str(lab),
        str(target),
        {"gpus": gpus},
        cwd=str(FOLDER),
        progress_bar=False,
        execution_timeout=CELL_TIMEOUT_S,
    )
    executed = nbformat.read(target, as_version=4)
    assert notebooks.errors(executed) == []
    code = [cell for cell in executed.cells if cell.cell_type == "code" and cell.source.strip()]
    assert all(cell.execution_count is not None for cell in code)
    (injected,) = [c for c in code if "injected-parameters" in c.metadata.get("tags", ())]
    assert f"gpus = {gpus}" in injected.source
    if solved:
        done = {path.name for path in (tmp_path / "data" / "progress").iterdir()}
        assert done == {f"{name}.solved" for name in exercises}


def solve(lab: Path, target: Path) -> Path:
    """A copy of the lab in which every exercise has a right answer, its results of other types."""
    notebook = nbformat.read(lab, as_version=4)
    for cell in notebook.cells:
        for name in lab_rules.EXERCISE.findall(cell.source):
            head, _, _ = cell.source.partition("@lab.exercise")
            other = inspect.getsource(as_tensors_and_tuples)
            cell.source = head + IMPORTS + other + ANSWER.replace("NAME", name)
    nbformat.write(notebook, target)
    return target


def nbval(lab: Path) -> subprocess.CompletedProcess[str]:
    """pytest --nbval-lax in a process of its own, so that a hang has an end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax"]
    command += [f"--nbval-cell-timeout={CELL_TIMEOUT_S}", "--rootdir", str(lab.parent), lab.name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        command,
        cwd=lab.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LAB_TIMEOUT_S,
    )


@pytest.fixture
def good(tmp_path: Path) -> Path:
    lab = notebook_maker.write(tmp_path / "labs" / "01_good.ipynb", "print(gpus)", "gpus + 1")
    notebooks.refresh(lab)
    return lab


def test_the_rules_accept_a_good_lab(good: Path) -> None:
    assert lab_rules.broken_rules(nbformat.read(good, as_version=4), "some-host") == []


def code_cell(notebook: Any) -> Any:
    return notebook.cells[3]


def output(text: str, name: str = "stdout") -> Any:
    return nbformat.v4.new_output("stream", name=name, text=text)


SPOILERS: dict[str, Callable[[Any], Any]] = {
    "kernelspec": lambda nb: nb.metadata.kernelspec.update(name="my-env"),
    "metadata besides": lambda nb: nb.metadata.update(widgets={}),
    "0 cells are tagged": lambda nb: nb.cells[1].metadata.update(tags=[]),
    "plain assignments": lambda nb: nb.cells[1].update(source="import os\ngpus = 1"),
    "gpus among them": lambda nb: nb.cells[1].update(source="epochs = 1"),
    "ids of their own": lambda nb: nb.cells[0].update(id=nb.cells[1].id),
    "no outputs": lambda nb: [cell.update(outputs=[]) for cell in nb.cells],
    "one run": lambda nb: code_cell(nb).update(execution_count=7),
    "an error": lambda nb: code_cell(nb).outputs.append(
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    ),
    "stderr": lambda nb: code_cell(nb).outputs.append(output("oops", "stderr")),
    "a widget": lambda nb: code_cell(nb).outputs.append(
        nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}})
    ),
    "a path": lambda nb: code_cell(nb).outputs.append(output("/home/me/labs")),
    "a time": lambda nb: code_cell(nb).outputs.append(output("done at 2026-01-02 03:04")),
    "a host name": lambda nb: code_cell(nb).outputs.append(output("on some-host now")),
    "an address|a address": lambda nb: code_cell(nb).outputs.append(
        output("<X at 0x7f2345678901>")
    ),
    "when it was executed": lambda nb: code_cell(nb).metadata.update(execution={}),
    "not a title": lambda nb: nb.cells[0].update(source="Hello"),
    "in ten has over 16": lambda nb: code_cell(nb).update(source="x = 1\n" * 20),
    "has 50 lines": lambda nb: code_cell(nb).update(source="x = 1\n" * 50),
    "no prose before": lambda nb: nb.cells.pop(2),
}


@pytest.mark.parametrize("rule", SPOILERS)
def test_each_rule_can_be_broken(good: Path, rule: str) -> None:
    notebook = nbformat.read(good, as_version=4)
    SPOILERS[rule](notebook)
    broken = lab_rules.broken_rules(notebook, "some-host")
    assert any(word in text for word in rule.split("|") for text in broken), broken


def test_nbval_compares_marked_cells(good: Path) -> None:
    assert nbval(good).returncode == 0
    notebook = nbformat.read(good, as_version=4)
    code_cell(notebook).source = "# NBVAL_CHECK_OUTPUT\nprint(gpus + 1)"
    nbformat.write(notebook, good)
    done = nbval(good)
    assert done.returncode == 1, done.stdout
    assert "Cell outputs differ" in done.stdout


def test_exercises_are_seen_in_the_source(tmp_path: Path) -> None:
    lab = notebook_maker.write(tmp_path / "a.ipynb", '@lab.exercise("shards")\ndef f(): ...')
    assert lab_rules.exercises(nbformat.read(lab, as_version=4)) == {"shards"}
