"""Every lab in a real JupyterLab, and in Notebook 7: it runs, it draws live, its pictures stay."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

LABS = sorted(p.name for p in Path(__file__).parents[2].glob("labs/[0-9][0-9]_*.ipynb"))
SECONDS = 300
"""How long a lab may take here; it is a guard, not a measurement."""

WATCH = """
window.seen = {};  // of every live view by its name: when it came, when it went, whether it drew
setInterval(() => {
  for (const view of document.querySelectorAll(".lab-live")) {
    const title = view.getAttribute("aria-label"), now = performance.now();
    const seen = (window.seen[title] ??= { from: now, drawn: false });
    seen.to = now;
    const { height } = view.querySelector("canvas");
    seen.drawn ||= height > 60 && !!view.querySelector(".lab-legend span");
  }
}, 50);
"""
WIDGET = "application/vnd.jupyter.widget-view+json"
IMAGES = "[...document.querySelectorAll('.jp-OutputArea-output img')]"
LONG_MS = 1500
"""A view that was there for so long must have drawn; a shorter one may go before it could."""

ALSO_IN_SHORT = ("00_start_here.ipynb", "lab/tree")
"""The one that ``make test`` opens; ``make test-all`` opens every lab in both programs."""

everywhere = pytest.mark.parametrize(
    ("name", "program"),
    [
        pytest.param(*case, marks=() if case == ALSO_IN_SHORT else pytest.mark.full)
        for case in itertools.product(LABS, ("lab/tree", "notebooks"))
    ],
)


@everywhere
def test_runs_all_draws_live_and_keeps_pictures(
    page: Any, lab_server: Any, name: str, program: str, open_notebook: Callable[..., None],
    run_all: Callable[[Any], None], wait_idle: Callable[..., None],
) -> None:  # fmt: skip
    path = lab_server.root / "labs" / name
    clear(path)
    page.add_init_script(WATCH)
    open_notebook(page, f"labs/{name}", program=program)
    run_all(page)
    wait_idle(page, seconds=SECONDS)
    # Notebook 7 complains about plugins of JupyterLab that it does not have.
    assert [e for e in page.errors if "registered" not in e and "'schema'" not in e] == []
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    outputs = check_outputs(saved(path))
    check_live_views(page.evaluate("window.seen"), outputs)
    check_reopened(page, f"labs/{name}", outputs, partial(open_notebook, program=program))


def clear(path: Path) -> None:
    """Take the stored outputs away, so that what is found later was made here."""
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    path.write_text(json.dumps(notebook))


def saved(path: Path) -> Any:
    """The notebook in the file, once it holds outputs."""
    for _ in range(300):
        notebook = json.loads(path.read_text())
        if any(cell.get("outputs") for cell in notebook["cells"]):
            return notebook
        time.sleep(0.1)
    raise AssertionError(f"{path.name} was not saved")


def check_outputs(notebook: Any) -> list[dict[str, Any]]:
    """Every cell ran without an error, and the live views have become pictures; their data."""
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [o["evalue"] for o in outputs if o["output_type"] == "error"] == []
    left = ["".join(c["source"]) for c in cells if not c["execution_count"]]
    assert [source for source in left if source.strip()] == []
    data = [o["data"] for o in outputs if "data" in o]
    widgets = [d for d in data if WIDGET in d]
    assert all("".join(d["text/plain"]).startswith("sliders:") for d in widgets)
    return data


def check_live_views(seen: dict[str, Any], outputs: list[dict[str, Any]]) -> None:
    """Those that were there long enough have drawn, and each has left a picture."""
    live = [d for d in outputs if "".join(d.get("text/plain", "")).startswith("timeline:")]
    assert all("image/png" in d for d in live)
    assert bool(live) == bool(seen)
    blank = [t for t, v in seen.items() if v["to"] - v["from"] > LONG_MS and not v["drawn"]]
    assert blank == []


def check_reopened(
    page: Any, path: str, outputs: list[dict[str, Any]], open_notebook: Callable[..., None]
) -> None:
    """After a reload, with the kernel shut down, all pictures are there."""
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    open_notebook(page, path, kernel=False)
    pictures = sum("image/png" in d for d in outputs)
    page.wait_for_function(
        f"count => {IMAGES}.filter(i => i.naturalWidth > 200).length === count",
        arg=pictures, timeout=30_000,
    )  # fmt: skip
    assert "Loading widget" not in page.inner_text(".jp-Notebook")
