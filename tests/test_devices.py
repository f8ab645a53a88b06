"""``lab.gpus`` and ``lab.describe``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import labutils as lab


def test_without_real_gpus_they_are_virtual() -> None:
    if torch.cuda.device_count() >= 3:
        pytest.skip("this machine has real GPUs")
    assert [str(d) for d in lab.gpus(3)] == ["vgpu:0", "vgpu:1", "vgpu:2"]
    assert "3 × virtual" in lab.describe(lab.gpus(3))


def test_real_ones_are_used_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(d) for d in lab.gpus(2)] == ["cuda:0", "cuda:1"]
    assert not lab.virtual.is_enabled()
    assert lab.gpus(3)[0].type == "vgpu"
    assert lab.gpus(2, compute="phantom")[0].type == "vgpu"


@pytest.mark.parametrize("count", [0, -1, 65, 2.5, "4", True])
def test_impossible_numbers_are_a_sentence(count: Any) -> None:
    with pytest.raises(ValueError, match="choose a whole number from 1 to 64"):
        lab.gpus(count)


def test_an_unknown_profile_names_near_ones() -> None:
    with pytest.raises(ValueError, match="V100-SXM2"):
        lab.gpus(2, profile="V100-SXM")
    with pytest.raises(ValueError, match="'real' or 'phantom'"):
        lab.gpus(2, compute="imaginary")


def test_phantom_gpus_say_that_they_compute_no_values() -> None:
    assert "none computed" in lab.describe(lab.gpus(2, compute="phantom"))
    assert "exact" in lab.describe(lab.gpus(2))
