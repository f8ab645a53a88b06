"""What each notebook of the labs must keep to, as functions that return what is wrong with one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

LONGEST_USUAL, LONGEST = 16, 40
"""Lines of a code cell: nine in ten cells have at most the first, none more than the second."""

_PATH = re.compile(r"(?:/home/|/root/|/tmp/|/Users/|/work/|/private/|[A-Z]:\\\\Users)\S*")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d|\b\d\d:\d\d:\d\d\b")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")
EXERCISE = re.compile(r"@lab\.exercise\(\s*[\"'](\w+)[\"']")


def broken_rules(notebook: Any, host_name: str) -> list[str]:
    """Every rule that the notebook breaks, each in a few words."""
    return [
        *_metadata(notebook),
        *_stored_outputs(notebook),
        *_leaks(notebook, host_name),
        *_layout(notebook),
    ]


def exercises(notebook: Any) -> set[str]:
    """Names of the exercises that the notebook sets."""
    return {name for cell in _code(notebook) for name in EXERCISE.findall(cell.source)}


def _metadata(notebook: Any) -> Iterator[str]:
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "the kernelspec is not python3"
    if set(notebook.metadata) - {"kernelspec", "language_info"}:
        yield f"metadata besides the kernel: {sorted(notebook.metadata)}"
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    if len(tagged) != 1:
        yield f"{len(tagged)} cells are tagged 'parameters' instead of one"
    elif not _defaults(tagged[0].source):
        yield "the parameters cell has something else than plain assignments, gpus among them"
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) != len(ids):
        yield "cells lack ids of their own"


def _defaults(source: str) -> bool:
    body = ast.parse(source).body
    plain = all(isinstance(node, ast.Assign | ast.AnnAssign) for node in body)
    return plain and re.search(r"^gpus\b", source, re.MULTILINE) is not None


def _stored_outputs(notebook: Any) -> Iterator[str]:
    cells = list(_code(notebook))
    if not any(cell.outputs for cell in cells):
        yield "no outputs are stored: make labs"
    counts = [cell.execution_count for cell in cells if cell.source.strip()]
    if counts != list(range(1, len(counts) + 1)):
        yield "the outputs do not come from one run from top to bottom: make labs"
    for number, output in _outputs(notebook):
        if output.output_type == "error":
            yield f"cell {number} stores an error: {output.ename}"
        if output.output_type == "stream" and output.name == "stderr":
            yield f"cell {number} stores text on stderr: {output.text[:80]!r}"
        if any("widget" in kind for kind in output.get("data", {})):
            yield f"cell {number} stores a widget, which no reader will see"


def _leaks(notebook: Any, host_name: str) -> Iterator[str]:
    """What only the author's machine or day has."""
    rules = {"path": _PATH, "time": _DATE, "address of an object": _ADDRESS}
    if not host_name.isalpha():  # a machine called "gpu" would find itself everywhere
        rules["host name"] = re.compile(rf"\b{re.escape(host_name)}\b")
    for number, output in _outputs(notebook):
        texts = [output.get("text", ""), output.get("evalue", "")]
        texts += [str(v) for k, v in output.get("data", {}).items() if k.startswith("text/")]
        for what, rule in rules.items():
            if found := rule.search("\n".join(texts)):
                yield f"cell {number} stores a {what}: {found.group()[:60]}"
    for number, cell in enumerate(notebook.cells, 1):
        if "execution" in cell.metadata or "papermill" in cell.metadata:
            yield f"cell {number} stores when it was executed"


def _layout(notebook: Any) -> Iterator[str]:
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        yield "the first cell is not a title"
    cells = list(_code(notebook))
    lines = [len(cell.source.splitlines()) for cell in cells]
    if sum(n <= LONGEST_USUAL for n in lines) < 0.9 * len(lines):
        yield f"more than one code cell in ten has over {LONGEST_USUAL} lines"
    if max(lines, default=0) > LONGEST:
        yield f"a code cell has {max(lines)} lines"
    pairs = zip(notebook.cells, notebook.cells[1:])
    after_code = [b for a, b in pairs if a.cell_type == b.cell_type == "code"]
    # The check of an exercise belongs right below it, the imports below the parameters.
    bare = sum(not re.match(r"lab\.check\(|import |from ", cell.source) for cell in after_code)
    if bare > 0.2 * len(cells):
        yield f"{bare} of {len(cells)} code cells have no prose before them"


def _code(notebook: Any) -> Iterator[Any]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def _outputs(notebook: Any) -> Iterator[tuple[int, Any]]:
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", ()):
            yield number, output
