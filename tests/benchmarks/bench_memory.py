"""Memory of a student: JupyterLab, a kernel and two ranks, while each lab runs with two GPUs.

Counted is the proportional set size of JupyterLab and of everything below it, at its highest: a
page that several of these processes share counts once.  Linux only.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_GB = 1.8
EVERY_S = 0.3


class Peak(threading.Thread):
    """Looks at a process and all below it, again and again; ``gb`` is the most that it saw."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.gb, self._root, self._end = 0.0, psutil.Process(pid), threading.Event()

    def run(self) -> None:
        while not self._end.wait(EVERY_S):
            self.gb = max(self.gb, sum(map(_pss, self._all())) / 1e9)

    def _all(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def stop(self) -> float:
        self._end.set()
        self.join()
        return self.gb


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0


class Jupyter:
    """JupyterLab on a copy of the labs, and its web interface."""

    def __init__(self, home: Path) -> None:
        shutil.copytree(REPOSITORY / "labs", home / "labs")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.token = secrets.token_hex(8)
        folders = {
            f"JUPYTER_{kind}_DIR": str(home / kind) for kind in ("CONFIG", "DATA", "RUNTIME")
        }
        self.runtime = home / "RUNTIME"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
             f"--ServerApp.port={self.port}", f"--ServerApp.root_dir={home / 'labs'}",
             f"--IdentityProvider.token={self.token}"],
            env={**os.environ, **folders, "LABUTILS_DATA": str(home)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(300):
            try:
                self.ask("GET", "status")
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("JupyterLab did not start")

    def ask(self, method: str, what: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{what}", method=method,
            headers={"Authorization": f"token {self.token}"},
            data=json.dumps(body).encode() if body else None,
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def measure() -> list[tuple[str, float, float]]:
    """Gigabytes for each lab."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        jupyter = Jupyter(Path(folder))
        try:
            for path in sorted((REPOSITORY / "labs").glob("*.ipynb")):
                rows.append((f"memory of {path.stem}, 2 ranks [GB]", _run(jupyter, path), MOST_GB))
        finally:
            jupyter.close()
    return rows


def _run(jupyter: Jupyter, path: Path) -> float:
    import nbformat
    from jupyter_client import BlockingKernelClient

    session = jupyter.ask(
        "POST", "sessions", path=path.name, name=path.name, type="notebook",
        kernel={"name": "python3"},
    )  # fmt: skip
    kernel = session["kernel"]["id"]
    client = BlockingKernelClient(connection_file=str(jupyter.runtime / f"kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels()
    peak = Peak(jupyter.process.pid)
    try:
        client.wait_for_ready(60)
        peak.start()
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type != "code":
                continue
            two = "\ngpus = 2" if "parameters" in cell.metadata.get("tags", ()) else ""
            reply = client.execute_interactive(
                cell.source + two, timeout=300, output_hook=lambda message: None
            )
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"{path.name}: {reply['content']['evalue']}")
    finally:
        gb = peak.stop() if peak.is_alive() else 0.0
        client.stop_channels()
        jupyter.ask("DELETE", f"sessions/{session['id']}")
    return gb
