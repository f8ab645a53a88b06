"""Every lab runs on real GPUs, and its deterministic outputs are those that it stores."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
import torch

from labutils import notebooks

FOLDER = Path(__file__).parents[2] / "labs"
LABS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
CHECKED = "nbval-check-output"
GPUS = sorted({max(1, min(torch.cuda.device_count(), 8)), 2})
"""All that there are, and two ranks: on one GPU they share it."""


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("lab", LABS, ids=[path.stem for path in LABS])
def test_runs_on_cuda(lab: Path, gpus: int, tmp_path: Path) -> None:
    target = tmp_path / lab.name
    papermill.execute_notebook(
        str(lab), str(target), {"gpus": gpus}, cwd=str(FOLDER), progress_bar=False,
        execution_timeout=300,
    )  # fmt: skip
    executed = nbformat.read(target, as_version=4)
    assert notebooks.errors(executed) == []
    stored = nbformat.read(lab, as_version=4)
    default = next(c for c in stored.cells if "parameters" in c.metadata.get("tags", ()))
    if f"gpus = {gpus} " in default.source:
        assert different(stored, executed) == []


def different(stored: Any, executed: Any) -> list[str]:
    """Cells marked as deterministic whose words agree and whose numbers do not (within 1 %)."""
    found = []
    now = {cell.id: text_of(cell) for cell in executed.cells if cell.cell_type == "code"}
    for cell in stored.cells:
        if CHECKED not in cell.metadata.get("tags", ()):
            continue
        before, after = text_of(cell), now[cell.id]
        if NUMBER.sub("#", before) == NUMBER.sub("#", after):  # else it tells of the hardware
            pairs = zip(NUMBER.findall(before), NUMBER.findall(after), strict=True)
            if not all(close(a, b) for a, b in pairs):
                found.append(f"{before}\n-- but on CUDA --\n{after}")
    return found


def close(a: str, b: str) -> bool:
    one, other = float(a.replace(",", "")), float(b.replace(",", ""))
    return abs(one - other) <= 0.01 * max(abs(one), abs(other), 1e-3)


def text_of(cell: Any) -> str:
    """What a cell has printed or returned, in plain text, with "cuda" under its virtual name."""
    texts = [
        output.text if output.output_type == "stream" else output.data.get("text/plain", "")
        for output in cell.outputs
        if output.output_type in ("stream", "execute_result", "display_data")
    ]
    return "\n".join(texts).replace("cuda:", "vgpu:")
