"""``labutils run`` on small notebooks: what it reports must be what happened."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from rank_helpers import alive, wait_until

from labutils import batch
from labutils.cli import main
from tests import notebook_maker

RANKS = """
import os, time, labutils as lab
def wait(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(600)
lab.launch(wait, ranks=2, args=(FOLDER,), timeout=None)
"""


HANGS_ONCE = """
import pathlib, time
flag = pathlib.Path(FLAG)
if not flag.exists():
    flag.touch()
    time.sleep(600)
"""
ROOT = Path(__file__).parent.parent
needs_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no signals like these"
)


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def start(labs: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "labutils", "run", str(labs), "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_one_failing_lab_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labs, out = tmp_path / "labs", tmp_path / "results"
    notebook_maker.write(labs / "00_good.ipynb", "print(gpus * 100)")
    notebook_maker.write(labs / "01_bad.ipynb", "1 / 0", "print('never')")
    notebook_maker.write(labs / "02_leaves.ipynb", "raise SystemExit(0)", "print(1)")
    notebook_maker.write(labs / "02_dies.ipynb", "import os; os._exit(0)", "print(1)")
    (labs / "02_text.ipynb").write_text("no notebook")
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
        "02_text": "failed",
        "03_plain": "failed",
        "04_other": "failed",
        "05_last": "passed",
    }
    assert "ZeroDivisionError" in results["01_bad"]["message"]
    assert "left the notebook" in results["02_leaves"]["message"]
    assert "not appear to be JSON" in results["02_text"]["message"]
    assert "no cell is tagged 'parameters'" in results["03_plain"]["message"]
    assert "no parameter 'gpus'; there are: epochs" in results["04_other"]["message"]
    assert not summary(out)["passed"]
    executed = nbformat.read(out / "00_good.ipynb", as_version=4)
    assert any("800" in str(cell.get("outputs")) for cell in executed.cells)
    page = (out / "summary.html").read_text()
    assert "2 of 8 labs passed" in page
    assert 'href="00_good.ipynb"' in page
    assert "ZeroDivisionError" in page
    assert "2 of 8 labs passed" in capsys.readouterr().out


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


def test_a_cell_that_hangs_is_a_timeout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lab = notebook_maker.write(tmp_path / "01_hang.ipynb", "import time; time.sleep(600)")
    result = batch.run_lab(lab, tmp_path / "out.ipynb", {"gpus": 1}, timeout_s=2)
    assert (result.status, result.message) == ("timeout", "a cell took longer than 2 s")
    assert "Traceback" not in capfd.readouterr().err


@needs_signals
def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    """Stood in for by a limit on the size of a file, which the executed notebook exceeds."""
    notebook_maker.write(tmp_path / "labs" / "01_big.ipynb", "print('x' * 2_000_000)")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "labutils", "run", str(tmp_path / "labs"), "--out", str(out)]
    limited = ["bash", "-c", 'ulimit -f 1000 && exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (result,) = summary(out)["results"]
    assert result["message"] == f"File too large, while {out / '01_big.ipynb'} was written"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "0"], "--gpus must be a whole number from 1 to 64, not 0."),
        (["--gpus", "65"], "--gpus must be a whole number from 1 to 64, not 65."),
        (["--set", "gpus=abc"], "--gpus must be a whole number from 1 to 64, not 'abc'."),
        (["--set", "gpus=True"], "--gpus must be a whole number from 1 to 64, not True."),
        (["--timeout", "0"], "--timeout must be more than 0 seconds"),
        (["--timeout", "nan"], "--timeout must be more than 0 seconds and finite, not nan."),
        (["--timeout", "inf"], "--timeout must be more than 0 seconds and finite, not inf."),
        (["--only", "07"], "There is no lab '07'"),
        (["--set", "epochs"], "--set takes NAME=VALUE, not 'epochs'."),
        (["--set", "gpuz=3"], "no lab asked for has a parameter 'gpuz'; there are: gpus."),
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


def test_timeouts_are_rounded_up_to_whole_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(batch, "run_labs", lambda *words: asked.append(words[3]) or [])
    lab = notebook_maker.write(tmp_path / "01_a.ipynb")
    for timeout in ("0.5", "2", "2.5"):
        main(["run", str(lab), "--timeout", timeout])
    assert asked == [1, 2, 3]
    assert all(type(timeout) is int for timeout in asked), "Jupyter takes nothing else"


def test_results_never_overwrite_the_labs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = notebook_maker.write(tmp_path / "01_a.ipynb")
    before = lab.read_bytes()
    assert main(["run", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "is the lab itself" in capsys.readouterr().err
    assert lab.read_bytes() == before


def test_what_a_lab_shows_is_in_the_summary(tmp_path: Path) -> None:
    notebook_maker.write(
        tmp_path / "labs" / "01_a.ipynb",
        "import labutils as lab",
        'lab.key_figure("speed", 3.0, "GB/s", "measured", expected=(1, 2))',
        'lab.key_figure("size <b>", 5, "MB", "simulated")',
        "print('Exercise ring: solved, the cells below use your answer.')",
        "print('Exercise tree: not solved yet, the cells below use the reference solution.')",
        "import os; print(os.environ['LABUTILS_DATA'])",
    )
    out = tmp_path / "out"
    assert main(["run", str(tmp_path / "labs"), "--out", str(out)]) == 0
    (result,) = summary(out)["results"]
    assert result["exercises"] == {"ring": "solved", "tree": "unsolved"}
    speed, size = result["figures"]
    assert (speed["value"], speed["unit"], speed["expected"]) == (3.0, "GB/s", [1, 2])
    assert not speed["within"]
    assert size["within"]
    assert summary(out)["versions"]["torch"].startswith("2.")
    assert summary(out)["machine"]["cores"] >= 1
    page = (out / "summary.html").read_text()
    for text in ("1 of 2", "3 GB/s", "1 to 2", "✘ outside", "size &lt;b&gt;", "no range known"):
        assert text in page
    # The learner's own progress is left alone.
    notebook = nbformat.read(out / "01_a.ipynb", as_version=4)
    assert notebook.cells[-1].outputs[0].text.strip() == str(out / ".progress")


def test_resume_keeps_what_has_passed_and_has_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labs, out = tmp_path / "labs", tmp_path / "out"
    notebook_maker.write(labs / "01_a.ipynb", "print(1)")
    notebook_maker.write(labs / "02_b.ipynb", "1 / 0")
    words = ["run", str(labs), "--out", str(out), "--resume"]
    assert main(words) == 1
    first = (out / "01_a.ipynb").read_bytes()
    notebook_maker.write(labs / "02_b.ipynb", "print(2)")
    assert main(words) == 0
    assert (out / "01_a.ipynb").read_bytes() == first, "it had passed, and was not run again"
    assert "passed before" in capsys.readouterr().out
    assert [result["status"] for result in summary(out)["results"]] == ["passed", "passed"]
    assert main([*words, "--gpus", "2", "--only", "01"]) == 0
    assert (out / "01_a.ipynb").read_bytes() != first, "other parameters: it was run again"


def test_runs_side_by_side(tmp_path: Path) -> None:
    notebook_maker.write(tmp_path / "labs" / "01_a.ipynb", "print(1)")
    runs = [start(tmp_path / "labs", tmp_path / f"out{number}") for number in range(2)]
    shown = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], shown


def test_one_folder_takes_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook_maker.write(tmp_path / "labs" / "01_a.ipynb", "print(1)")
    out = tmp_path / "out"
    out.mkdir()
    with batch._alone_in(out):
        assert main(["run", str(tmp_path / "labs"), "--out", str(out)]) == 2
    assert "another run is writing to" in capsys.readouterr().err


def until_it_hangs(run: subprocess.Popen[str], flag: Path) -> None:
    """Wait until the lab of :data:`HANGS_ONCE` has come to its sleep."""
    deadline = time.monotonic() + 120
    while not flag.exists():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline, "the lab never came up"
        time.sleep(0.05)


@needs_signals
def test_a_killed_run_does_not_say_that_it_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labs, out, flag = tmp_path / "labs", tmp_path / "out", tmp_path / "flag"
    notebook_maker.write(labs / "00_a.ipynb", "print(1)")
    notebook_maker.write(labs / "01_b.ipynb", HANGS_ONCE.replace("FLAG", repr(str(flag))))
    run = start(labs, out)
    until_it_hangs(run, flag)
    run.kill()
    run.communicate(timeout=30)
    assert [result["status"] for result in summary(out)["results"]] == ["passed", "not run"]
    assert summary(out)["passed"] is False
    assert "1 of 2 labs passed" in (out / "summary.html").read_text()
    assert list(out.glob(".task-*")), "a killed process cannot tidy up"

    (out / ".summary.json.half").touch()
    assert main(["run", str(labs), "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().out.count("passed before") == 1
    assert summary(out)["passed"] is True
    assert {path.name for path in out.iterdir()} <= {
        "summary.json", "summary.html", ".lock", ".progress", "00_a.ipynb", "01_b.ipynb",
    }  # fmt: skip


@needs_signals
def test_impatient_interrupts_do_not_lose_the_summary(tmp_path: Path) -> None:
    labs, out, flag = tmp_path / "labs", tmp_path / "out", tmp_path / "flag"
    notebook_maker.write(labs / "00_a.ipynb", HANGS_ONCE.replace("FLAG", repr(str(flag))))
    notebook_maker.write(labs / "01_b.ipynb", "print(1)")
    run = start(labs, out)
    until_it_hangs(run, flag)
    while run.poll() is None:
        run.send_signal(signal.SIGINT)
        time.sleep(0.05)
    shown = run.communicate(timeout=30)[0]
    assert run.returncode == 130, shown
    assert "Traceback" not in shown
    stopped, never = summary(out)["results"]
    assert (stopped["status"], never["status"]) == ("stopped", "not run")
    assert stopped["seconds"] > 0, "it had run for as long as its kernel took to start"
    page = (out / "summary.html").read_text()
    assert "0 of 2 labs passed" in page
    assert "– not run" in page
    assert not list(out.glob(".task-*"))


def test_signals_are_handled_as_before_once_a_run_is_over(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with batch._stoppable():
        assert signal.getsignal(signal.SIGINT) is batch._interrupt
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_job_out_of_time_is_submitted_again_as_its_header_says(tmp_path: Path) -> None:
    job = ROOT / "labs" / "scripts" / "run_labs.sbatch"
    (line,) = [text for text in job.read_text().splitlines() if "--out results-OLD" in text]
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (programs / "labutils").write_text('#!/bin/sh\n[ "$1" = doctor ] || echo "$@"\n')
    (programs / "labutils").chmod(0o755)
    done = subprocess.run(
        ["bash", job, *line.partition(job.name)[2].split()],
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "78", "SLURM_SUBMIT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    parser = argparse.ArgumentParser()
    batch.add_arguments(parser)
    understood = parser.parse_args(done.stdout.split()[1:])
    assert (understood.out, understood.resume) == (Path("results-OLD_JOB_ID"), True)


@needs_signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_no_rank(tmp_path: Path, number: signal.Signals) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    notebook_maker.write(tmp_path / "labs" / "01_a.ipynb", RANKS.replace("FOLDER", repr(str(pids))))
    run = start(tmp_path / "labs", out)
    deadline = time.monotonic() + 120
    while len(os.listdir(pids)) < 2:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline, "the ranks never came up"
        time.sleep(0.05)
    below = psutil.Process(run.pid).children(recursive=True)
    assert {int(pid) for pid in os.listdir(pids)} <= {process.pid for process in below}
    run.send_signal(number)
    ended = [process.pid for process in below]
    assert wait_until(lambda: not alive(*ended), 10), alive(*ended)
    shown = run.communicate(timeout=30)[0]
    if number != signal.SIGKILL:
        assert run.returncode == 130, shown
        assert [result["status"] for result in summary(out)["results"]] == ["stopped"]
        assert {path.name for path in out.iterdir()} <= {
            "summary.json", "summary.html", ".lock", ".progress", "01_a.ipynb",
        }  # fmt: skip
