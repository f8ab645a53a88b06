"""What a learner does with keys and the mouse: solve an exercise, ask for hints, press Stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat

STUB = """
import labutils as lab
@lab.exercise("ring_bytes")
def ring_bytes(nbytes, ranks):
    ...
"""
ANSWER = """
import labutils as lab
@lab.exercise("ring_bytes")
def ring_bytes(nbytes, ranks):
    return 2 * (ranks - 1) / ranks * nbytes
"""
FOREVER = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
import labutils as lab

def forever():
    while True:
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.01)
        Path(f"rank {dist.get_rank()}").write_text(str(time.time()))

lab.launch(forever, 2, watch=True)
"""
IN_BACKGROUND = FOREVER.replace("watch=True", "watch=True, block=False").replace(
    "\nlab.l", "\nrun = lab.l"
)
CANVAS = ".lab-live canvas"
IMAGE = "document.querySelector('.jp-OutputArea-output img')"


def write(path: Path, *cells: str) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata.kernelspec = {"name": "python3", "display_name": "p", "language": "python"}
    nbformat.write(book, path)


def run_cell(page: Any, number: int, wait_idle: Callable[..., None]) -> str:
    """Select a cell, run it with the keyboard, and return the text of its output."""
    page.locator(".jp-CodeCell").nth(number).locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_timeout(200)
    wait_idle(page)
    return str(page.locator(".jp-CodeCell").nth(number).locator(".jp-OutputArea").inner_text())


def test_exercise_hint_and_solution(
    page: Any, lab_server: Any, open_notebook: Callable[..., None],
    wait_idle: Callable[..., None],
) -> None:  # fmt: skip
    name = "ring_bytes"
    calls = [f'lab.{what}("{name}")' for what in ("check", "hint", "solution")]
    write(lab_server.root / "labs/try.ipynb", STUB, *calls)
    open_notebook(page, "labs/try.ipynb")
    assert "not solved yet, the cells below use the reference" in run_cell(page, 0, wait_idle)
    assert "not solved yet" in run_cell(page, 1, wait_idle)
    assert "hint 1 of" in run_cell(page, 2, wait_idle)
    again = run_cell(page, 2, wait_idle)
    assert "hint 2 of" in again and "1." in again
    assert "def ring_bytes" in run_cell(page, 3, wait_idle)

    page.locator(".jp-CodeCell").nth(0).locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(ANSWER)
    assert "solved, the cells below use your answer" in run_cell(page, 0, wait_idle)
    assert "solved, right in all" in run_cell(page, 1, wait_idle)
    assert page.errors == []


def test_stop_stops_the_ranks(
    page: Any, lab_server: Any, open_notebook: Callable[..., None], wait_idle: Callable[..., None],
) -> None:  # fmt: skip
    folder = lab_server.root / "stop"
    folder.mkdir()
    write(folder / "forever.ipynb", FOREVER, "6 * 7")
    open_notebook(page, "stop/forever.ipynb")
    page.locator(".jp-CodeCell").nth(0).locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(CANVAS, timeout=60_000)
    page.wait_for_selector(".lab-legend >> text=communication", timeout=60_000)

    page.click("[data-command='notebook:interrupt-kernel'], [title^='Interrupt']")
    wait_idle(page)
    assert "KeyboardInterrupt" in page.locator(".jp-OutputArea").first.inner_text()
    beats = [(folder / f"rank {rank}").read_text() for rank in (0, 1)]
    time.sleep(1)
    assert beats == [(folder / f"rank {rank}").read_text() for rank in (0, 1)]
    page.wait_for_function(f"{IMAGE}?.naturalWidth > 600")
    assert page.locator(CANVAS).count() == 0
    assert "42" in run_cell(page, 1, wait_idle)  # the kernel is well
    assert page.errors == []


def test_a_run_in_the_background_has_a_stop_button(
    page: Any, lab_server: Any, open_notebook: Callable[..., None], wait_idle: Callable[..., None],
) -> None:  # fmt: skip
    folder = lab_server.root / "background"
    folder.mkdir()
    write(folder / "forever.ipynb", IN_BACKGROUND, "run")
    open_notebook(page, "background/forever.ipynb")
    assert "To end it: run.stop()" in run_cell(page, 0, wait_idle)
    page.wait_for_selector(".lab-legend >> text=communication", timeout=60_000)
    assert "2 ranks: running" in run_cell(page, 1, wait_idle)

    page.get_by_role("button", name="stop").click()
    page.wait_for_function(f"{IMAGE}?.naturalWidth > 600")
    assert "2 ranks: stopped" in run_cell(page, 1, wait_idle)
    assert "To end it" not in page.locator(".jp-OutputArea").first.inner_text()
    beats = [(folder / f"rank {rank}").read_text() for rank in (0, 1)]
    time.sleep(1)
    assert beats == [(folder / f"rank {rank}").read_text() for rank in (0, 1)]
    assert page.errors == []
