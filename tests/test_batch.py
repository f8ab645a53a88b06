"""``labutils run`` on small notebooks: what it reports must be what happened."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from labutils import batch
from labutils.cli import main
from tests import notebook_maker


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def test_one_failing_lab_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labs, out = tmp_path / "labs", tmp_path / "results"
    notebook_maker.write(labs / "00_good.ipynb", "print(gpus * 100)")
    notebook_maker.write(labs / "01_bad.ipynb", "1 / 0", "print('never')")
    notebook_maker.write(labs / "02_leaves.ipynb", "raise SystemExit(0)", "print(1)")
    notebook_maker.write(labs / "02_dies.ipynb", "import os; os._exit(0)", "print(1)")
    notebook_maker.write(labs / "03_plain.ipynb", "print(1)", parameters=None)
    notebook_maker.write(labs / "04_other.ipynb", "print(1)", parameters="epochs = 1")
    notebook_maker.write(labs / "05_last.ipynb", "print('here')")

    assert main(["run", str(labs), "--gpus", "8", "--out", str(out)]) == 1

    results = {result["lab"]: result for result in summary(out)["results"]}
    assert {lab: result["status"] for lab, result in results.items()} == {
        "00_good": "passed",
        "01_bad": "failed",
        "02_leaves": "failed",
        "02_dies": "failed",
        "03_plain": "failed",
        "04_other": "failed",
        "05_last": "passed",
    }
    assert "ZeroDivisionError" in results["01_bad"]["message"]
    assert "left the notebook" in results["02_leaves"]["message"]
    assert "no cell is tagged 'parameters'" in results["03_plain"]["message"]
    assert "no parameter 'gpus'; there are: epochs" in results["04_other"]["message"]
    assert not summary(out)["passed"]
    executed = nbformat.read(out / "00_good.ipynb", as_version=4)
    assert any("800" in str(cell.get("outputs")) for cell in executed.cells)
    page = (out / "summary.html").read_text()
    assert "2 of 7 labs passed" in page
    assert 'href="00_good.ipynb"' in page
    assert "ZeroDivisionError" in page
    assert "2 of 7 labs passed" in capsys.readouterr().out


def test_passing_labs_exit_with_zero(tmp_path: Path) -> None:
    notebook_maker.write(tmp_path / "01_a.ipynb", "assert gpus == 2 and epochs == 3")
    notebook_maker.write(
        tmp_path / "02_b.ipynb",
        "assert (gpus, epochs) == (2, 3)",
        parameters="gpus = 4\nepochs = 1",
    )
    out = tmp_path / "out"
    words = ["run", str(tmp_path), "--gpus", "2", "--out", str(out), "--set", "epochs=3"]
    assert main([*words, "--only", "02"]) == 0
    assert [result["lab"] for result in summary(out)["results"]] == ["02_b"]
    assert main([*words, "--only", "01_a,02"]) == 1  # 01 has no epochs: not silently ignored
    assert "no parameter 'epochs'" in summary(out)["results"][0]["message"]
    assert not (out / "01_a.ipynb").exists()


def test_a_cell_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    lab = notebook_maker.write(tmp_path / "01_hang.ipynb", "import time; time.sleep(600)")
    result = batch.run_lab(lab, tmp_path / "out.ipynb", {"gpus": 1}, timeout_s=2)
    assert (result.status, result.message) == ("timeout", "a cell took longer than 2 s")
    assert result.seconds < 60


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "0"], "--gpus must be from 1 to 64, not 0."),
        (["--gpus", "65"], "--gpus must be from 1 to 64, not 65."),
        (["--timeout", "0"], "--timeout must be more than 0 seconds"),
        (["--only", "07"], "There is no lab '07'"),
        (["--set", "epochs"], "--set takes NAME=VALUE, not 'epochs'."),
    ],
)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    notebook_maker.write(tmp_path / "labs" / "01_a.ipynb")
    out = tmp_path / "out"
    assert main(["run", str(tmp_path / "labs"), "--out", str(out), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not out.exists()


def test_results_never_overwrite_the_labs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = notebook_maker.write(tmp_path / "01_a.ipynb")
    before = lab.read_bytes()
    assert main(["run", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "is the lab itself" in capsys.readouterr().err
    assert lab.read_bytes() == before
