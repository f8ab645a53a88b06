"""A rehearsed network as hardware: the profile that is written, and what a step takes on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.timing import profiles, rehearsed

FAST: dict[str, Any] = {
    "kind": "cpu", "ranks": 2, "threads": 1, "date": "2026-01-01", "name": "CPU",
    "memory": 2**33, "processors": 1, "matmul": {"float32": [[512, 1e15]]},
    "conv": [[64, 1e15]], "bandwidth": 1e15, "shortest": 1e-9, "to_device": {}, "all_reduce": [],
}  # fmt: skip
"""A machine that computes in no time, so that a step is its all-reduce."""


def step(model: nn.Module, tmp_path: Path, bandwidth: str, delay: str | None = None) -> float:
    path = rehearsed.profile(FAST, bandwidth, delay, tmp_path)
    example = torch.randn(4, 100), torch.randint(10, (4,))
    return lab.predict(model, 4, nodes=2, profile=path, example=example).step_s


def test_the_profile_is_that_of_the_link(tmp_path: Path) -> None:
    profile = profiles.load(rehearsed.profile(FAST, "800mbit", "5ms", tmp_path))
    assert profile.fabric is not None
    assert profile.fabric.bandwidth == pytest.approx(100e6, rel=0.01)  # headers take less than 1 %
    assert profile.fabric.bandwidth < 100e6
    assert profile.fabric.latency == pytest.approx(5e-3, rel=0.1)


def test_a_step_takes_as_long_as_its_bytes(tmp_path: Path) -> None:
    """Two ranks send the gradient once each: bits over bits per second."""
    model = nn.Linear(100, 10_000)
    bits = 32 * sum(p.numel() for p in model.parameters())
    for mbit in (50, 200):
        assert step(model, tmp_path, f"{mbit}mbit") == pytest.approx(bits / mbit / 1e6, rel=0.03)


def test_a_delay_counts_per_message(tmp_path: Path) -> None:
    """An all-reduce of two ranks is two messages one after the other, in each of the buckets."""
    model = nn.Linear(100, 10)
    more = step(model, tmp_path, "1gbit", "50ms") - step(model, tmp_path, "1gbit")
    assert more == pytest.approx(0.1, rel=0.05)


def test_no_bandwidth_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no bandwidth"):
        rehearsed.profile(FAST, "quick", None, tmp_path)
    assert list(tmp_path.iterdir()) == []
