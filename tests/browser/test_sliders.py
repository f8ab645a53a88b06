"""``lab.what_if`` in a real JupyterLab: a move of a slider answers, and the notebook goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

CELL = """
import labutils as lab
lab.what_if("resnet18", profile="2080-Ti", fabric="eth-10g", batch=32)
"""
TEXT = ".jp-RenderedHTMLCommon p:has-text('Simulated:')"
MESSAGE = ".lab-sliders [role=status]"
IMAGES = "[...document.querySelectorAll('.jp-OutputArea-output img')].slice(0, 2).map(i => i.src)"
ALONE = "text=Run this cell to have its sliders"


@pytest.fixture
def notebook(lab_server: Any) -> str:
    """A notebook with the view in its first cell, another view with sliders below; its path."""
    cells = [nbformat.v4.new_code_cell(source) for source in (CELL, "lab.who_am_i(2, 2)")]
    book = nbformat.v4.new_notebook(cells=cells)
    book.metadata.kernelspec = {"name": "python3", "display_name": "p", "language": "python"}
    nbformat.write(book, Path(lab_server.root, "what_if.ipynb"))
    return "what_if.ipynb"


def test_a_move_answers_and_the_notebook_keeps_what_was_shown(
    page: Any, notebook: str, open_notebook: Callable[..., None],
    run_all: Callable[[Any], None], wait_idle: Callable[..., None],
) -> None:  # fmt: skip
    open_notebook(page, notebook)
    run_all(page)
    page.wait_for_selector(".lab-sliders", timeout=90_000)
    page.wait_for_selector(".widget-slider", timeout=90_000)
    wait_idle(page)
    assert [place.is_visible() for place in page.locator(ALONE).all()] == [False, False]
    assert "resnet18 in DistributedDataParallel on 8 × 2080-Ti" in page.inner_text(TEXT)

    check_keyboard(page)
    check_out_of_memory(page)
    check_first_use_of_a_precision(page)
    assert page.errors == []

    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')", timeout=30_000)
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    open_notebook(page, notebook, kernel=False)
    page.wait_for_selector(ALONE)
    assert [place.is_visible() for place in page.locator(ALONE).all()] == [True, True]
    assert "batch 512 per GPU, amp" in page.inner_text(TEXT)
    assert len(page.evaluate(IMAGES)) == 2
    for lost in page.locator("text=Error displaying widget").all():
        assert lost.is_hidden()


def slider(page: Any, name: str) -> Any:
    """By its name, as a screen reader finds it."""
    return page.get_by_role("slider", name=name)


def check_keyboard(page: Any) -> None:
    """An arrow key moves a slider, the answer comes, and the focus stays."""
    before = page.evaluate(IMAGES)
    slider(page, "nodes").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(f"{TEXT}:has-text(' on 2 nodes over eth-10g')")
    page.wait_for_function(f"old => {IMAGES}.every(src => !old.includes(src))", arg=before)
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(f"{TEXT}:has-text('DistributedDataParallel on 8 × 2080-Ti,')")
    assert slider(page, "nodes").get_attribute("aria-valuetext") == "1"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.parentElement.textContent").startswith("batch")


def check_out_of_memory(page: Any) -> None:
    slider(page, "batch per GPU").focus()
    page.keyboard.press("End")
    page.wait_for_selector("[role=alert]:has-text('Out of memory: each GPU would hold')")
    assert "does not fit" in page.inner_text(TEXT)


def check_first_use_of_a_precision(page: Any) -> None:
    """It is recorded meanwhile: the view says so, the sliders stay, and the answer follows."""
    page.get_by_role("combobox", name="precision").select_option("amp")
    page.wait_for_function(
        f"document.querySelector('{MESSAGE}').textContent.startsWith('Recording a step in amp')"
        f" || document.querySelector('{TEXT.split(':')[0]}').textContent.includes('amp')"
    )
    page.wait_for_selector(f"{TEXT}:has-text('batch 512 per GPU, amp')", timeout=90_000)
    assert page.inner_text(MESSAGE) == ""
    assert slider(page, "batch per GPU").get_attribute("aria-valuetext") == "512"
    page.wait_for_timeout(1000)  # the scaling curve comes a little later
