"""The command line: every registered command loads, and help costs no heavy import."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labutils import cli
from tests import notebook_maker


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main([command, "--help"])
    assert leaving.value.code == 0
    assert f"labutils {command}" in capsys.readouterr().out


def test_no_command_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["trian"])
    assert leaving.value.code == 2
    assert "trian" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("labutils.doctor.main", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "labutils doctor: interrupted\n"


def test_what_the_system_refuses_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = notebook_maker.write(tmp_path / "01_a.ipynb")
    out = lab / "results"  # below a file there can be no folder
    assert cli.main(["run", str(lab), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"labutils run: cannot use {out}: N")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_a_sentence(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "labutils", "doctor"], stdout=full, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "labutils doctor: cannot write the output: No space left on device.\n"


def test_what_the_system_refuses_elsewhere_is_not_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: object) -> int:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr("labutils.doctor.main", refuse)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "labutils doctor: Address already in use\n"


def test_module_and_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "labutils", "run", "/no/such/folder"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        "labutils run: There is no notebook at /no/such/folder; name the folder of the labs.\n"
    )
