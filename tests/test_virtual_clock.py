"""Simulated time between events, against the cost model and the order of work."""

from __future__ import annotations

import pytest
import torch

import labutils as lab
from labutils.timing import cost, profiles
from labutils.virtual.state import state


@pytest.fixture(autouse=True)
def _gpus() -> None:
    lab.virtual.enable(2, profile="A100-SXM4-80GB", compute="phantom")


def timed(work: int) -> float:
    """Milliseconds that the events around ``work`` large products tell."""
    a = torch.empty(8192, 8192, device="vgpu:0")
    start, end = torch.vgpu.Event(enable_timing=True), torch.vgpu.Event(enable_timing=True)
    start.record()
    for _ in range(work):
        a @ a
    end.record()
    torch.vgpu.synchronize()
    return start.elapsed_time(end)


def test_products_take_what_the_cost_model_says() -> None:
    mark = state.recorder.count
    five = timed(5)
    products = [
        e.kernel for e in state.recorder.since(mark)[0] if e.kernel and e.kernel.name == "mm"
    ]
    expected = sum(cost.kernel_seconds(k, profiles.load("A100-SXM4-80GB")) for k in products)
    assert len(products) == 5
    assert five == pytest.approx(1e3 * expected, rel=0.02)


def test_time_is_the_same_every_time_and_adds_up() -> None:
    assert timed(4) == timed(4)
    assert timed(8) > 1.9 * timed(4)


def test_nothing_between_two_events_takes_no_longer_than_a_launch() -> None:
    assert 0 <= timed(0) < 0.05


def test_an_event_that_was_not_recorded_is_said_so() -> None:
    start, end = torch.vgpu.Event(), torch.vgpu.Event()
    start.record()
    with pytest.raises(RuntimeError, match="Both events must be recorded"):
        start.elapsed_time(end)
