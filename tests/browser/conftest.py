"""A real JupyterLab and a headless Chromium, for any test that opens a notebook.

    def test_something(page, lab_server, open_notebook, run_all, wait_idle):
        open_notebook(page, "labs/02_dataparallel.ipynb")   # a path below lab_server.root
        run_all(page)
        wait_idle(page, seconds=300)

The server has its own folders and a copy of labs/, so nothing of the user's is read or changed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
QUIET = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
"""JupyterLab's settings: it asks nothing, fetches nothing, saves when told to, and has every cell
in the page, also those that one would have to scroll to."""


@dataclass(frozen=True)
class LabServer:
    """A running JupyterLab: its address (with ``token``) and the folder that it serves."""

    url: str
    token: str
    root: Path


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab on a free port of this machine, serving a copy of labs/."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install jupyterlab")
    home = tmp_path_factory.mktemp("jupyter")
    root = home / "root"
    root.mkdir()
    if (REPOSITORY / "labs").is_dir():
        shutil.copytree(REPOSITORY / "labs", root / "labs")
    _write_settings(home / "settings")
    token = secrets.token_hex(16)
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            _command(root, token), env=_environment(home), stdout=log, stderr=log
        )
    try:
        yield LabServer(_wait_for(process, home, token), token, root)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def browser(chromium: Path) -> Iterator[Any]:
    """Chromium of this system (tests/conftest.py skips where there is none)."""
    api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(chromium), args=CHROMIUM_FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page, 1280 × 1100; ``page.errors`` collects what goes wrong in it."""
    context = browser.new_context(viewport={"width": 1280, "height": 1100})
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: _note_error(page, message))
    yield page
    context.close()


@pytest.fixture
def open_notebook(lab_server: LabServer) -> Callable[..., None]:
    """``open_notebook(page, path)``: opens a notebook, and waits for its kernel.

    ``program`` is "lab/tree" for JupyterLab, "notebooks" for Notebook 7.
    """

    def open_(page: Any, path: str, *, kernel: bool = True, program: str = "lab/tree") -> None:
        page.goto(f"{lab_server.url}{program}/{path}?token={lab_server.token}&reset")
        page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell", timeout=90_000)
        if kernel:
            _wait(page, f"{_KERNEL}?.status === 'idle'", 90)

    return open_


@pytest.fixture
def run_all() -> Callable[[Any], None]:
    """``run_all(page)``: starts every cell, and returns at once."""

    def run(page: Any) -> None:
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        page.wait_for_function(
            "[...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')]"
            ".some(prompt => /[*0-9]/.test(prompt.textContent))"
        )

    return run


@pytest.fixture
def wait_idle() -> Callable[..., None]:
    """``wait_idle(page, seconds=60)``: until no cell runs or waits."""

    def wait(page: Any, seconds: float = 60) -> None:
        prompts = "[...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')]"
        busy = f"{prompts}.some(prompt => prompt.textContent.includes('*'))"
        _wait(page, f"{_KERNEL}?.status === 'idle' && !{busy}", seconds)

    return wait


_KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"


def _wait(page: Any, condition: str, seconds: float) -> None:
    page.wait_for_function(condition, timeout=seconds * 1000, polling=200)


def _note_error(page: Any, message: Any) -> None:
    # live.js is loaded from a blob; anything else is JupyterLab's own noise
    if message.type == "error" and (
        message.location.get("url", "").startswith("blob:") or "anywidget" in message.text
    ):
        page.errors.append(message.text)


def _command(root: Path, token: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", f"--ServerApp.root_dir={root}",
        f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]  # fmt: skip


def _environment(home: Path) -> dict[str, str]:
    folders = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
    }  # fmt: skip
    paths = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        **{name: str(home / folder) for name, folder in folders.items()},
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _write_settings(folder: Path) -> None:
    for plugin, values in QUIET.items():
        path = folder / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _wait_for(process: subprocess.Popen[bytes], home: Path, token: str) -> str:
    """The server's address, from the file that it writes once it listens."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        for path in (home / "runtime").glob("jpserver-*.json"):
            try:
                url = str(json.loads(path.read_text())["url"])
                urllib.request.urlopen(f"{url}api/status?token={token}", timeout=5).close()
                return url
            except (OSError, ValueError):
                pass  # not yet
        time.sleep(0.2)
    raise RuntimeError("JupyterLab did not start:\n" + (home / "server.log").read_text()[-2000:])
