"""A class report counts what outputs say, and lives with whatever people hand in."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from nbformat import v4

from labutils import class_report, outcome
from labutils.cli import main
from tests import notebook_maker

ROOT = Path(__file__).resolve().parents[1]


def verdict(name: str, status: str) -> Any:
    return v4.new_output(
        "execute_result", {"text/plain": "..."}, metadata={"labutils": mark(name, status)}
    )


def mark(name: str, status: str) -> dict[str, str]:
    return {"check": name, "status": status}


def said(text: str) -> Any:
    return v4.new_output("stream", name="stdout", text=text)


def shown(**mark: object) -> Any:
    return v4.new_output("display_data", {"text/plain": "..."}, metadata={"labutils": mark})


def write(path: Path, *cells: tuple[str, Any], minutes: int = 0) -> Path:
    """A notebook whose code cells have the given sources and outputs, as if run in that order."""
    made = []
    for number, (source, output) in enumerate(cells, 1):
        outputs = [output] if output is not None else []
        cell = v4.new_code_cell(source, execution_count=number, outputs=outputs, id=f"c{number}")
        start, end = f"2026-05-04T10:{0:02}:00.000000", f"2026-05-04T10:{minutes:02}:00.000000"
        if minutes:
            cell.metadata["papermill"] = {"start_time": start, "end_time": end}
        made.append(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(v4.new_notebook(cells=made), path)
    return path


def ex(name: str) -> str:
    return f'@lab.exercise("{name}")\ndef {name}(): ...'


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "class.csv", newline="", encoding="utf-8-sig") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def test_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = v4.new_output("error", ename="ValueError", evalue="no", traceback=["no"])
    write(
        tmp_path / "ann" / "whatever.ipynb",
        (ex("ring"), said("Exercise ring: not right yet, the cells below use the reference.\n")),
        ('lab.hint("ring")', shown(hint="ring", given=1)),
        ('lab.hint("ring")', shown(hint="ring", given=2)),
        ('lab.solution("ring")', shown(solution="ring")),
        ('lab.check("ring")', verdict("ring", "solved")),
        (ex("tree"), said("Exercise tree: solved, the cells below use your answer.\n")),
        ("int('x')", error),
        minutes=30,
    )
    write(tmp_path / "bob" / "03.ipynb", (ex("ring"), verdict("ring", "wrong")))
    write(tmp_path / "bob" / "03-Copy1.ipynb", (ex("ring"), verdict("ring", "solved")))
    write(tmp_path / "bob" / "z.ipynb", (ex("ring"), verdict("ring", "unsolved")))
    write(tmp_path / "cy.ipynb", (ex("tree"), verdict("tree", "unsolved")))
    (tmp_path / "bob" / ".ipynb_checkpoints").mkdir()
    write(tmp_path / "bob" / ".ipynb_checkpoints" / "03.ipynb", (ex("x"), verdict("x", "solved")))

    assert main(["class-report", str(tmp_path)]) == 0
    assert "3 students" in capsys.readouterr().out
    ann, bob, cy = (rows(tmp_path)[name] for name in ("ann", "bob", "cy"))
    counted = ("solved", "wrong", "open", "hints", "solutions shown", "errors", "cells run")
    assert [ann[name] for name in counted] == ["2", "0", "0", "2", "1", "1", "7 of 7"]
    assert (ann["ring"], ann["tree"], ann["minutes"]) == ("solved", "solved", "30")
    assert (bob["ring"], bob["tree"], bob["notebooks"]) == ("solved", "", "3"), "the best counts"
    assert (cy["open"], cy["tree"], cy["minutes"]) == ("1", "unsolved", "")
    page = (tmp_path / "class.html").read_text()
    assert "3 students, 2 exercises" in page
    assert page.count("✔") == 4  # ann's two, bob's one, and the legend's


def test_one_file_for_each_lab_and_student(tmp_path: Path) -> None:
    for name in ("00_start_here_kim", "06_clinic-kim", "04_ddp_single_node", "lee"):
        write(tmp_path / f"{name}.ipynb", (ex("ring"), verdict("ring", "solved")))
    assert main(["class-report", str(tmp_path)]) == 0
    assert {name: row["notebooks"] for name, row in rows(tmp_path).items()} == {
        "04_ddp_single_node": "1", "kim": "2", "lee": "1"
    }  # fmt: skip


def test_the_last_verdict_counts_in_the_order_of_execution() -> None:
    first = v4.new_code_cell("a", execution_count=9, outputs=[verdict("ring", "solved")])
    later = v4.new_code_cell("b", execution_count=4, outputs=[verdict("ring", "wrong")])
    never = v4.new_code_cell("c", outputs=[verdict("ring", "unsolved")])
    found = outcome.read(v4.new_notebook(cells=[first, later, never]))
    assert found.exercises == {"ring": "solved"}
    assert (found.executed, found.cells) == (2, 3)


def test_what_cannot_be_read_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "good" / "a.ipynb", (ex("ring"), verdict("ring", "solved")))
    for name, content in {
        "empty": b"", "cut": b'{"cells": [', "binary": b"\xff\xfe\x00", "list": b"[]",
        "old": b'{"nbformat": 2, "cells": 7}', "odd": b'{"nbformat": 4, "cells": [{"x": 1}]}',
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.ipynb").write_bytes(content)
    assert main(["class-report", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    found = rows(tmp_path / "out")
    assert found["good"]["solved"] == "1"
    for name in ("empty", "cut", "binary", "list", "old", "odd"):
        assert f"{name}/a.ipynb cannot be read: " in found[name]["notes"]
        assert f"{name}: {name}/a.ipynb cannot be read" in printed


def test_who_has_handed_in_nothing_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / ".class", tmp_path / ".class" / "report"
    write(folder / "ann" / "a.ipynb", (ex("ring"), verdict("ring", "solved")))
    (folder / "bob").mkdir()
    (folder / "cy" / "deep").mkdir(parents=True)
    (folder / "cy" / "answers.txt").touch()
    for name in (".git", "__MACOSX"):
        (folder / name).mkdir()
    for _ in range(2):  # the second time the report's own folder is there
        assert main(["class-report", str(folder), "--out", str(out)]) == 0
        found = rows(out)
        assert {name: row["notes"] for name, row in found.items()} == {
            "ann": "", "bob": "no notebook", "cy": "no notebook",
        }  # fmt: skip
        assert found["bob"]["notebooks"] == "0"
        assert capsys.readouterr().out.startswith("3 students: ")


def test_an_unreadable_file_beside_the_folders_is_no_student(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.ipynb").write_text("{")
    (tmp_path / "kim.ipynb").write_text("{")
    (tmp_path / "class").mkdir()
    assert main(["class-report", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("3 students"), "one file for each student"
    write(tmp_path / "ann" / "a.ipynb", (ex("ring"), verdict("ring", "solved")))
    write(tmp_path / "kim" / "a.ipynb", (ex("ring"), verdict("ring", "solved")))
    (tmp_path / "class").rmdir()
    assert main(["class-report", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("2 students") and "bad: bad.ipynb cannot be read" in printed
    assert "2 students, 1 exercises" in (tmp_path / "class.html").read_text()
    assert set(rows(tmp_path)) == {"ann", "kim", "bad (file)"}
    assert "kim.ipynb cannot be read" in rows(tmp_path)["kim"]["notes"]


def test_what_looks_odd_is_noted(tmp_path: Path) -> None:
    write(tmp_path / "ann" / "a.ipynb", (ex("ring"), verdict("ring", "solved")))
    write(tmp_path / "bob" / "a.ipynb", (ex("ring"), verdict("ring", "solved")))
    write(tmp_path / "cy" / "a.ipynb", ("pass", verdict("ring", "solved")))
    notebook_maker.write(tmp_path / "dee" / "a.ipynb", "1")
    write(tmp_path / "=1+1" / "<b>.ipynb", (ex("ring"), verdict("ring", "hacked")))
    assert main(["class-report", str(tmp_path)]) == 0
    found = rows(tmp_path)
    assert found["bob"]["notes"] == "bob/a.ipynb is the same file as ann/a.ipynb"
    assert found["cy"]["notes"] == "cy/a.ipynb has a verdict on ring, but not the exercise"
    assert found["cy"]["ring"] == ""
    assert found["dee"]["notes"] == "dee/a.ipynb was not run"
    assert found["'=1+1"]["ring"] == "", "a name that a spreadsheet would compute is quoted"
    assert "<b>.ipynb" not in (tmp_path / "class.html").read_text()


def test_an_empty_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["class-report", str(tmp_path)]) == 2
    assert "There is no notebook in" in capsys.readouterr().err


def test_a_notebook_that_was_really_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABUTILS_LABS", str(ROOT / "labs"))
    path = notebook_maker.write(
        tmp_path / "ann" / "lab.ipynb",
        "import labutils as lab",
        '@lab.exercise("ring_bytes")\ndef ring_bytes(elements, ranks): ...',
        'lab.hint("ring_bytes")',
        'lab.check("ring_bytes")',
        '@lab.exercise("shard_sizes")\ndef shard_sizes(*args): return 7',
        'lab.check("shard_sizes")',
        'lab.solution("shard_sizes")',
        "1 / 0",
    )
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True).execute()
    nbformat.write(notebook, path)
    (student,) = class_report.gather(tmp_path)
    assert student.exercises == {"ring_bytes": "unsolved", "shard_sizes": "wrong"}
    assert (student.hints, student.solutions, student.errors) == (1, 1, 1)
    assert student.seconds > 0
