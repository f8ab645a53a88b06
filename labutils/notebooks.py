"""Notebooks as files: finding them, reading their parameters, and refreshing stored outputs.

What a repository stores must be the same whoever executed it: :func:`clean` takes out times, paths,
host names, addresses of objects and the state of widgets, and keeps the cells' ids.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KERNELSPEC = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
KERNEL_ARGUMENTS = ["--log-level=CRITICAL"]
"""What a kernel logs is for those who run a server: one that is ended within a cell logs that it
could not answer."""
CELL_TIMEOUT_S = 600

_WIDGET = "application/vnd.jupyter.widget-view+json"
_KEPT_CELL_METADATA = ("tags", "jupyter", "editable", "deletable", "slideshow")
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")


def find(folder: str | Path, only: str | None = None) -> list[Path]:
    """The notebooks of a folder in order; ``only`` names some by number or name: ``"02,03"``.

    A notebook itself may be given instead of its folder.
    """
    folder = Path(folder)
    notebooks = [folder] if folder.suffix == ".ipynb" else sorted(folder.glob("*.ipynb"))
    if not notebooks or not all(path.is_file() for path in notebooks):
        raise ValueError(f"There is no notebook at {folder}; name the folder of the labs.")
    if only is None:
        return notebooks
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    known = ", ".join(path.stem for path in notebooks)
    for word in wanted:
        if not any(_is(path, word) for path in notebooks):
            raise ValueError(f"There is no lab {word!r} in {folder}; there are: {known}.")
    return [path for path in notebooks if any(_is(path, word) for word in wanted)]


def parameters(notebook: Any) -> list[str] | None:
    """Names assigned in the cell tagged ``parameters``; None if no cell is tagged so."""
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            return [name for node in ast.parse(cell.source).body for name in _targets(node)]
    return None


def errors(notebook: Any) -> list[tuple[int, str]]:
    """Cells whose output is an error, as (cell number from 1, message).

    A lab shows a failure by catching it: papermill counts any error output as a failed notebook.
    """
    return [
        (number, f"{output.ename}: {output.evalue}")
        for number, cell in enumerate(notebook.cells, 1)
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    ]


def clean(notebook: Any, folder: str | Path) -> None:
    """Take out of an executed notebook what differs between machines and runs, in place.

    ``folder`` is where it was executed; paths under it and under the home folder are shortened.
    """
    notebook.metadata = type(notebook.metadata)(
        kernelspec=dict(KERNELSPEC), language_info={"name": "python"}
    )
    for cell in notebook.cells:
        kept = {k: v for k, v in cell.metadata.items() if k in _KEPT_CELL_METADATA}
        cell.metadata = type(cell.metadata)(kept)
        if cell.cell_type == "code":
            cell.outputs = [o for o in _joined(cell.outputs) if _drop_widget(o)]
            for output in cell.outputs:
                _scrub_output(output, Path(folder))


def fingerprint(path: Path, parameters: Mapping[str, Any]) -> str:
    """Of all that decides how a lab runs: its code, the solutions and scripts, labutils, torch."""
    from importlib import metadata

    import nbformat

    digest = hashlib.sha256(repr(sorted(parameters.items())).encode())
    digest.update(metadata.version("torch").encode())
    for cell in nbformat.read(path, as_version=4).cells:
        digest.update(f"{cell.cell_type}\0{cell.source}\0".encode())
    files = [*Path(__file__).parent.rglob("*"), *path.parent.glob("s*/*")]
    for file in sorted(file for file in files if file.suffix in (".py", ".toml", ".csv", ".js")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def refresh(path: Path, timeout_s: float = CELL_TIMEOUT_S) -> None:
    """Execute one notebook in place, from a clean start; the file is replaced only on success."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name=KERNELSPEC["name"],
        resources={"metadata": {"path": str(path.parent.resolve())}},
        record_timing=False,
        extra_arguments=KERNEL_ARGUMENTS,
    )
    client.execute()
    clean(notebook, path.parent.resolve())
    write_whole(path, nbformat.writes(notebook) + "\n")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(name, path.stat().st_mode if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            error.filename = str(path)  # of a full disk the system names none
        raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils refresh``."""
    parser.add_argument("folder", type=Path, help="folder of the labs, or one notebook")
    parser.add_argument("--only", metavar="02,03", help="only these labs")
    parser.add_argument("--timeout", type=float, default=CELL_TIMEOUT_S, help="seconds for a cell")


def main(arguments: argparse.Namespace) -> int:
    """Refresh each notebook on the CPU, with nothing of this user's progress in it."""
    failed = 0
    with tempfile.TemporaryDirectory() as empty:
        os.environ.update(CUDA_VISIBLE_DEVICES="", LABUTILS_DATA=empty)
        for path in find(arguments.folder, arguments.only):
            print(f"{path.stem} ...", flush=True)
            try:
                refresh(path, arguments.timeout)
            except Exception as error:
                failed += 1
                print(f"{path.stem} failed, the file is as it was:\n{error}", file=sys.stderr)
    return 1 if failed else 0


def _is(path: Path, word: str) -> bool:
    return path.stem == word or path.stem.split("_")[0] == word


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign):
        targets: Sequence[ast.expr] = [node.target]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _joined(outputs: Sequence[Any]) -> list[Any]:
    """Neighbouring pieces of one stream as one: where the kernel cuts a stream is chance."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and output.output_type == "stream" == last.output_type and last.name == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _drop_widget(output: Any) -> bool:
    """Take a widget's view out of an output; False if nothing but its name would be left."""
    data = output.get("data", {})
    if data.pop(_WIDGET, None) is None:
        return True
    return bool(set(data) - {"text/plain"})


def _scrub_output(output: Any, folder: Path) -> None:
    output.get("metadata", {}).pop(_WIDGET, None)
    if "text" in output:
        output.text = _scrub(output.text, folder)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") and isinstance(value, str):
            output.data[kind] = _scrub(value, folder)
    if output.output_type == "error":
        output.evalue = _scrub(output.evalue, folder)
        output.traceback = [_scrub(line, folder) for line in output.traceback]


def _scrub(text: str, folder: Path) -> str:
    names = ((str(folder.parent) + os.sep, ""), (str(Path.home()), "~"), (sys.prefix, "python"))
    for name, short in sorted(names, key=lambda pair: -len(pair[0])):
        text = text.replace(name, short)
    text = _ADDRESS.sub("at 0x...", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "localhost", text)
