"""The live view in a real JupyterLab: it draws while a cell runs, and leaves a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

FEED = """
import time
from pathlib import Path
from labutils.live import LiveView
from labutils.trace import MemorySample, Span

gpus = [f"GPU {i}" for i in range(4)]
view = LiveView("browser test", gpus, {gpu: 16 * 2**30 for gpu in gpus}, "simulated", "T4")
view.show()
begun, step = time.perf_counter(), 0
while not Path("stop").exists() and time.perf_counter() - begun < 120:
    t = time.perf_counter() - begun
    spans = [Span("batch", t - 0.19, t - 0.17, "host", "main", "data"),
             Span("train_step", t - 0.17, t, "host", "main", "span")]
    for i, gpu in enumerate(gpus):
        spans += [
            Span("h2d", t - 0.17, t - 0.16 + 0.01 * i, gpu, "copy", "copy", 38 * 2**20, "pinned"),
            Span("convolution", t - 0.15, t - 0.1, gpu, "compute", "forward", 2**20, "float32"),
            Span("convolution_backward", t - 0.1, t - 0.03, gpu, "compute", "backward", 2**21),
            Span("all_reduce", t - 0.06, t - 0.02, gpu, "communication", "communication", 2**26),
            Span("sgd", t - 0.02, t - 0.005, gpu, "compute", "optimizer"),
            Span("replica", t - 0.15, t - 0.1, "host", f"worker {i}", "forward"),
        ]
    memory = [MemorySample(t - 0.2 + 0.02 * k, gpu, (1 + min(k, 9 - k)) * 2**31 // (1 + (i > 0)))
              for k in range(10) for i, gpu in enumerate(gpus)]
    view.update(spans, memory, t)
    time.sleep(0.2)
view.close()
"""

CANVAS = ".lab-live canvas"
PICTURE = ".jp-OutputArea-output img"
IMAGE = f"document.querySelector('{CANVAS}').toDataURL()"


@pytest.fixture
def notebook(lab_server: Any) -> Path:
    """A notebook whose one cell feeds a live view until a file named "stop" appears."""
    folder = lab_server.root / "live"
    folder.mkdir(exist_ok=True)
    (folder / "stop").unlink(missing_ok=True)
    path = folder / "feed.ipynb"
    write(path, "python3")
    return path


def write(path: Path, kernel: str, outputs: list[Any] | None = None) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FEED, outputs=outputs or [])])
    book.metadata.kernelspec = {"name": kernel, "display_name": kernel, "language": "python"}
    nbformat.write(book, path)


def wait_for_change(page: Any, before: str) -> str:
    """The canvas's picture once it differs from ``before``."""
    page.wait_for_function(f"before => {IMAGE} !== before", arg=before, timeout=10_000)
    return str(page.evaluate(IMAGE))


def test_draws_while_a_cell_runs_and_leaves_a_picture(
    page: Any, notebook: Path, open_notebook: Callable[..., None],
    run_all: Callable[[Any], None], wait_idle: Callable[..., None],
) -> None:  # fmt: skip
    open_notebook(page, "live/feed.ipynb")
    run_all(page)
    canvas = page.wait_for_selector(CANVAS, timeout=60_000)
    page.wait_for_selector(".lab-legend >> text=backward", timeout=20_000)
    first = page.evaluate(IMAGE)
    wait_for_change(page, first)  # by itself: the run goes on

    check_keyboard(page, canvas)
    check_hover(page, canvas)
    check_text_alternative(page)

    (notebook.parent / "stop").touch()
    wait_idle(page)
    assert page.locator(CANVAS).count() == 0
    page.wait_for_function(f"document.querySelector('{PICTURE}').naturalWidth > 600")
    assert page.errors == []

    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    (output,) = json.loads(notebook.read_text())["cells"][0]["outputs"]
    assert set(output["data"]) == {"text/plain", "image/png"}
    check_reopened_without_kernel(page, notebook, output, open_notebook)


def check_keyboard(page: Any, canvas: Any) -> None:
    canvas.focus()
    page.keyboard.press("Space")
    page.wait_for_selector(".lab-live button:has-text('resume')")
    still = page.evaluate(IMAGE)
    for key in ("+", "ArrowRight", "-", "ArrowLeft", "0"):
        page.keyboard.press(key)
        still = wait_for_change(page, still)
    page.keyboard.press("0")  # twice in a row would restart the kernel, were JupyterLab listening
    page.wait_for_timeout(300)
    assert page.locator(".jp-Dialog").count() == 0


def check_hover(page: Any, canvas: Any) -> None:
    box = canvas.bounding_box()
    found: set[str] = set()
    for x in range(140, int(box["width"]) - 70, 5):  # along the compute lane of the first GPU
        page.mouse.move(box["x"] + x, box["y"] + 66)
        found.update(page.inner_text(".lab-tip").split("\n"))
    assert {"convolution · forward", "GPU 0 · compute", "1 MiB", "float32"} <= found


def check_text_alternative(page: Any) -> None:
    label = f"document.querySelector('{CANVAS}').getAttribute('aria-label')"
    page.wait_for_function(f"{label}.includes('GPU 0, GPU 1, GPU 2, GPU 3, host over')")
    rows = page.locator(".lab-hidden table tr").all_text_contents()
    assert any("GPU 3" in row and "communication" in row for row in rows)


def check_reopened_without_kernel(
    page: Any, notebook: Path, output: Any, open_notebook: Callable[..., None]
) -> None:
    write(notebook.with_name("later.ipynb"), "gone", [nbformat.from_dict(output)])
    open_notebook(page, "live/later.ipynb", kernel=False)
    page.click(".jp-Dialog button:has-text('No Kernel')")
    page.wait_for_function(f"document.querySelector('{PICTURE}').naturalWidth > 600")
    assert "Loading widget" not in page.inner_text(".jp-Notebook")


def test_a_page_reloaded_during_the_run_gets_the_picture(
    page: Any, notebook: Path, open_notebook: Callable[..., None], run_all: Callable[[Any], None],
) -> None:  # fmt: skip
    open_notebook(page, "live/feed.ipynb")
    run_all(page)
    page.wait_for_selector(CANVAS, timeout=60_000)
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-OutputArea-output", timeout=90_000)
    (notebook.parent / "stop").touch()  # until then the busy kernel cannot answer the new page
    page.wait_for_function(
        f"document.querySelector('{PICTURE}')?.naturalWidth > 600", timeout=150_000
    )
    assert page.errors == []


def test_draws_in_notebook_7_too(page: Any, lab_server: Any, notebook: Path) -> None:
    page.goto(f"{lab_server.url}notebooks/live/feed.ipynb?token={lab_server.token}")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    page.click(".jp-Notebook .jp-CodeCell .cm-content")
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(CANVAS, timeout=60_000)
    page.wait_for_selector(".lab-legend >> text=backward", timeout=20_000)
    wait_for_change(page, page.evaluate(IMAGE))
    (notebook.parent / "stop").touch()
    page.wait_for_selector(CANVAS, state="detached", timeout=60_000)
    page.wait_for_function(f"document.querySelector('{PICTURE}')?.naturalWidth > 600")
    # Notebook 7 complains about plugins of JupyterLab that it does not have.
    assert [e for e in page.errors if "registered" not in e and "'schema'" not in e] == []


def test_legible_in_light_and_in_dark(
    page: Any, notebook: Path, open_notebook: Callable[..., None], run_all: Callable[[Any], None],
    tmp_path: Path,
) -> None:  # fmt: skip
    open_notebook(page, "live/feed.ipynb")
    run_all(page)
    page.wait_for_selector(".lab-legend >> text=backward", timeout=60_000)
    for theme in ("Dark", "Light"):
        page.evaluate(
            "name => window.jupyterapp.commands.execute('apputils:change-theme', { theme: name })",
            f"JupyterLab {theme}",
        )
        page.wait_for_function(f"{BRIGHTNESS} {'<' if theme == 'Dark' else '>'} 128")
        page.locator(".lab-live").screenshot(path=tmp_path / f"{theme}.png")
        for element in (".lab-live", ".lab-head i", ".lab-status", ".lab-live button"):
            assert page.evaluate(CONTRAST, element) >= 4.5, (theme, element)  # WCAG 2.1, level AA
    (notebook.parent / "stop").touch()
    assert page.errors == []


BRIGHTNESS = (
    f"(() => {{ const c = document.querySelector('{CANVAS}');"
    "return c.getContext('2d').getImageData(c.width - 1, 0, 1, 1).data[0]; })()"
)
"""Of the corner of the canvas, where nothing is drawn."""

CONTRAST = """selector => {
    const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
    const linear = (c) => (c <= 10.3 ? c / 3295 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const back = numbers(getComputedStyle(document.querySelector('.lab-live')).backgroundColor);
    const [r, g, b, a = 1] = numbers(getComputedStyle(document.querySelector(selector)).color);
    const ink = [r, g, b].map((c, i) => a * c + (1 - a) * back[i]);
    const [low, high] = [luminance(ink), luminance(back)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
}"""
