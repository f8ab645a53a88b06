"""The lab on DataParallel in a real JupyterLab: the live view moves, and pictures stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

NOTEBOOK = "labs/02_dataparallel.ipynb"
CANVAS = ".lab-live canvas"
IMAGE = f"document.querySelector('{CANVAS}').toDataURL()"
PICTURES = "[...document.querySelectorAll('.jp-OutputArea-output img')]"
TRAINING = "ten steps of nn.DataParallel"
BEGINNING = "gpus = 4"


@pytest.fixture
def longer(lab_server: Any) -> None:
    """The training lasts some seconds longer, so that there is time to look at it."""
    path = lab_server.root / NOTEBOOK
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            cell["source"] = "".join(cell["source"]).replace("range(10)", "range(100)")
    path.write_text(json.dumps(notebook))


@pytest.mark.usefixtures("longer")
def test_runs_all_draws_live_and_keeps_pictures(
    page: Any, lab_server: Any, open_notebook: Callable[..., None],
    run_all: Callable[[Any], None], wait_idle: Callable[..., None],
) -> None:  # fmt: skip
    open_notebook(page, NOTEBOOK)
    run_all(page)
    show_cell(page, TRAINING)
    canvas = page.wait_for_selector(CANVAS, timeout=120_000)
    page.wait_for_selector(".lab-legend >> text=backward", timeout=60_000)
    first = page.evaluate(IMAGE)
    page.wait_for_function(f"before => {IMAGE} !== before", arg=first, timeout=30_000)

    canvas.focus()
    page.keyboard.press("Space")  # hold the picture still
    page.wait_for_selector(".lab-live button:has-text('resume')")
    still = page.evaluate(IMAGE)
    page.keyboard.press("+")
    page.wait_for_function(f"before => {IMAGE} !== before", arg=still, timeout=10_000)

    wait_idle(page, seconds=300)
    assert page.errors == []
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')", timeout=30_000)
    check_outputs(json.loads((lab_server.root / NOTEBOOK).read_text()))
    check_reopened(page, open_notebook)


def show_cell(page: Any, text: str) -> None:
    """Scroll to the cell that contains ``text``."""
    page.evaluate(
        """async text => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const cells = notebook.widgets;
            const at = cells.findIndex(c => c.model.sharedModel.source.includes(text));
            await notebook.scrollToItem(at, 'start');
        }""",
        text,
    )


def check_outputs(notebook: Any) -> None:
    """Every cell ran without an error, and the live views have become pictures."""
    outputs = [o for c in notebook["cells"] if c["cell_type"] == "code" for o in c["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    data = [o["data"] for o in outputs if "data" in o]
    assert not [d for d in data if "application/vnd.jupyter.widget-view+json" in d]
    live = [d for d in data if str(d.get("text/plain", "")).find("timeline:") >= 0]
    assert len(live) == 3
    assert all("image/png" in d for d in live)


def check_reopened(page: Any, open_notebook: Callable[..., None]) -> None:
    """After a reload, with the kernel shut down, the pictures are still there."""
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    open_notebook(page, NOTEBOOK, kernel=False)
    show_cell(page, TRAINING)
    page.wait_for_function(f"{PICTURES}.some(image => image.naturalWidth > 600)", timeout=30_000)
    assert "Loading widget" not in page.inner_text(".jp-Notebook")
