"""The simulated timeline of the ranks of one run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labutils as lab
from labutils.timing import cost, profiles

WIDTH, BATCH = 64, 32


def all_reduce_twice() -> None:
    x = torch.ones(2**20, device=lab.device())
    for _ in range(2):
        dist.all_reduce(x)


def train() -> int:
    device = lab.device()
    net = DistributedDataParallel(
        nn.Linear(WIDTH, WIDTH, bias=False).to(device), device_ids=[device.index]
    )
    torch.vgpu.reset_peak_memory_stats(device)  # type: ignore[attr-defined]
    net(torch.randn(BATCH, WIDTH, device=device)).sum().backward()
    return torch.vgpu.max_memory_allocated(device)  # type: ignore[attr-defined]


def test_collectives_take_what_the_cost_model_says_and_end_together() -> None:
    trace = lab.launch(all_reduce_twice, 2).simulated("DGX-A100")
    expected = cost.collective_seconds("all_reduce", 4 * 2**20, 2, profiles.load("DGX-A100"))
    spans = [s for s in trace.spans if s.name == "all_reduce"]
    calls = [[s for s in spans if s.device == f"rank {r}"] for r in (0, 1)]
    assert [len(c) for c in calls] == [2, 2]
    for first, second in zip(*calls):
        assert first.end == second.end
        assert first.duration == pytest.approx(expected, rel=0.01)
    assert trace.source == "simulated"


def test_what_only_fills_memory_is_no_forward() -> None:
    trace = lab.launch(all_reduce_twice, 2).simulated("DGX-A100")
    assert {s.kind for s in trace.spans if s.lane == "compute"} == {"other"}
    kinds = {s.kind for s in lab.launch(train, 2).simulated().spans if s.lane == "compute"}
    assert {"forward", "backward"} <= kinds


def test_memory_is_that_of_each_ranks_ledger() -> None:
    run = lab.launch(train, 2)
    trace = run.simulated()
    assert [trace.peak_memory(f"rank {r}") for r in (0, 1)] == run.results


def test_other_hardware_gives_another_time() -> None:
    run = lab.launch(all_reduce_twice, 2)
    assert run.simulated("DGX-A100").duration < run.simulated("PCIe-box").duration


def test_without_virtual_gpus_there_is_nothing_to_simulate() -> None:
    run = lab.launch(lambda: 1, 2)
    with pytest.raises(ValueError, match="nothing to simulate: rank 0, 1"):
        run.simulated()
