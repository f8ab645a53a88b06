"""What the labs say of their parameters holds for every value that these may take."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch

LABS = Path(__file__).resolve().parents[1] / "labs"


def cell_with(lab: str, text: str) -> str:
    """The source of the only code cell that has the text."""
    (path,) = LABS.glob(f"{lab}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    (found,) = [c.source for c in cells if c.cell_type == "code" and text in c.source]
    return str(found)


def in_cell(lab: str, pattern: str, with_text: str) -> str:
    """What the pattern's group is in the only code cell that has the text."""
    found = re.search(pattern, cell_with(lab, with_text))
    assert found, f"that cell of lab {lab} has no {pattern}"
    return found[1]


@pytest.mark.parametrize("gpus", range(2, 9))
def test_the_shards_of_the_dataparallel_lab_are_unequal(gpus: int) -> None:
    for text in ("def gradients(", "class WithLoss", "weighted by shard size"):
        samples = int(in_cell("02", r"images\[:(\d+)\]", text))
        shards = torch.arange(samples).chunk(gpus)
        assert len({len(shard) for shard in shards}) > 1


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_batches_of_the_ddp_lab_can_be_shared_out_equally(ranks: int) -> None:
    images = in_cell("04", r"slice\(rank, (.+), size\)", "def losses():")
    assert eval(images, {"size": ranks}) % ranks == 0
    each = in_cell("04", r"batch=(.+)\):", "def train_from(")
    batch = eval(each, {"ranks": ranks})
    assert batch % ranks == batch % 2 == 0
    assert 6 * batch <= 1440  # there are so many images


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("nodes", 1, "nodes = 1: choose a whole number, 2 or more"),
        ("nodes", "two", "nodes = 'two': choose a whole number, 2 or more"),
        ("gpus", 0, "gpus = 0: choose a whole number, 1 or more"),
    ],
)
def test_the_lab_on_nodes_refuses_what_it_cannot_rehearse(name: str, value: Any, says: str) -> None:
    source = cell_with("05", "network.missing() or")
    network = SimpleNamespace(missing=lambda: None)
    exec(source, {"gpus": 2, "nodes": 2, "network": network})
    with pytest.raises(ValueError, match=says):
        exec(source, {"gpus": 2, "nodes": 2, "network": network, name: value})
