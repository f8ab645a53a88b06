"""Small notebooks for tests: cells as text, the first one tagged ``parameters``."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat import v4

KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def write(path: Path, *code: str, parameters: str | None = "gpus = 4") -> Path:
    """Write a notebook of a title, a parameters cell (unless None) and the given code cells."""
    cells = [v4.new_markdown_cell("# A lab", id="title")]
    if parameters is not None:
        cell = v4.new_code_cell(parameters, id="parameters", metadata={"tags": ["parameters"]})
        cells.append(cell)
    for number, source in enumerate(code, 1):
        cells.append(v4.new_markdown_cell("Some prose.", id=f"prose-{number}"))
        cells.append(v4.new_code_cell(source, id=f"code-{number}"))
    notebook = v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path
