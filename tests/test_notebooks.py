"""Refreshing stored outputs: the same text whoever executes, and never half a file."""

from __future__ import annotations

import errno
import socket
import stat
import sys
from pathlib import Path

import nbformat
import pytest

from labutils import notebooks
from labutils.cli import main
from tests import notebook_maker

TALKATIVE = """
import os, socket, sys
print("one"); sys.stdout.flush(); print("two")
print(os.getcwd(), os.path.expanduser("~/x"), socket.gethostname(), object())
"""
WIDGETS = """
from IPython.display import display
import ipywidgets
display(ipywidgets.IntSlider())
display({"image/png": "aGVsbG8=", "text/plain": "a figure",
         "application/vnd.jupyter.widget-view+json": {"model_id": "1"}}, raw=True)
"""


def test_refresh_is_repeatable_and_clean(tmp_path: Path) -> None:
    lab = notebook_maker.write(tmp_path / "labs" / "01_a.ipynb", TALKATIVE, WIDGETS)
    lab.chmod(0o644)
    notebooks.refresh(lab)
    first = lab.read_text()
    notebooks.refresh(lab)
    assert lab.read_text() == first

    notebook = nbformat.read(lab, as_version=4)
    assert [cell.id for cell in notebook.cells][:3] == ["title", "parameters", "prose-1"]
    assert notebook.metadata == {
        "kernelspec": notebooks.KERNELSPEC,
        "language_info": {"name": "python"},
    }
    assert notebook.cells[1].metadata == {"tags": ["parameters"]}
    (stream,) = notebook.cells[3].outputs
    assert stream.text == "one\ntwo\nlabs ~/x localhost <object object at 0x...>\n"
    (figure,) = notebook.cells[5].outputs
    assert dict(figure.data) == {"image/png": "aGVsbG8=", "text/plain": "a figure"}
    for leak in (str(tmp_path), str(Path.home()) + "/", socket.gethostname(), "iopub"):
        assert leak not in first
    assert stat.S_IMODE(lab.stat().st_mode) == 0o644
    assert [path.name for path in lab.parent.iterdir()] == ["01_a.ipynb"]


def test_a_failing_lab_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = notebook_maker.write(tmp_path / "01_bad.ipynb", "1 / 0")
    good = notebook_maker.write(tmp_path / "02_good.ipynb", "print('done')")
    before = bad.read_bytes()
    assert main(["refresh", str(tmp_path)]) == 1
    assert bad.read_bytes() == before
    assert "done" in good.read_text().partition("outputs")[2]
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("only", "names"),
    [(None, ["02_b", "10_c"]), ("02", ["02_b"]), ("10, 02", ["02_b", "10_c"]), ("10_c", ["10_c"])],
)
def test_find(tmp_path: Path, only: str | None, names: list[str]) -> None:
    for name in ("10_c", "02_b"):
        notebook_maker.write(tmp_path / f"{name}.ipynb")
    assert [path.stem for path in notebooks.find(tmp_path, only)] == names


def test_find_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no notebook at"):
        notebooks.find(tmp_path)
    with pytest.raises(ValueError, match="There is no notebook at"):
        notebooks.find(tmp_path / "01_a.ipynb")
    notebook_maker.write(tmp_path / "01_a.ipynb")
    with pytest.raises(ValueError, match="no lab '1' in .*; there are: 01_a"):
        notebooks.find(tmp_path, "1")


def test_parameters(tmp_path: Path) -> None:
    source = "# how many\ngpus = 4\nmodel: str = 'resnet50'\nassert gpus"
    lab = notebook_maker.write(tmp_path / "a.ipynb", "other = 1", parameters=source)
    assert notebooks.parameters(nbformat.read(lab, as_version=4)) == ["gpus", "model"]
    notebook_maker.write(lab, "gpus = 1", parameters=None)
    assert notebooks.parameters(nbformat.read(lab, as_version=4)) is None


def test_a_write_that_fails_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(*names: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        notebooks.write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="limits on a file's size are of Unix")
def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    """Of a full disk the system names none; nor does it where a file may grow no more."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            notebooks.write_whole(tmp_path / "a.txt", "more than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / "a.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_cell_out_of_time_is_told_in_a_few_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its kernel, which is ended while the cell runs, has nothing to say."""
    notebook_maker.write(tmp_path / "01_a.ipynb", "import time; time.sleep(3000)")
    assert main(["refresh", str(tmp_path), "--timeout", "1"]) == 1
    told = capfd.readouterr().err
    assert "Cell execution timed out" in told
    assert "Traceback" not in told and "zmq" not in told
