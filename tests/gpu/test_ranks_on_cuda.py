"""Ranks and watches on real GPUs give what the CPU gives.

With one GPU two ranks share it and talk over gloo; with several each has its own, over NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labutils as lab

GPUS = torch.cuda.device_count()
RANKS = max(2, min(GPUS, 4))
CLOSE = {"rtol": 1e-3, "atol": 1e-5}
"""Sums of float32 in another order."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip


def batch(seed: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 16, 16, generator=numbers)
    return images, torch.randint(10, (size,), generator=numbers)


def train(on_gpu: bool) -> list[torch.Tensor]:
    """In a rank: the parameters after three steps of DDP."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = lab.device() if on_gpu else torch.device("cpu")
    model = make_model().to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        images, labels = batch(10 * step + dist.get_rank())
        with lab.span("step"):
            optimizer.zero_grad()
            F.cross_entropy(ddp(images.to(device)), labels.to(device)).backward()
            optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def test_ranks_have_real_gpus() -> None:
    run = lab.launch(lambda: (str(lab.device()), dist.get_backend()), RANKS)
    own = GPUS >= RANKS
    assert [device for device, _ in run.results] == [f"cuda:{r % GPUS}" for r in range(RANKS)]
    assert all(("nccl" in backend) == own for _, backend in run.results)


def test_ddp_trains_as_on_the_cpu() -> None:
    there = lab.launch(train, RANKS, args=(True,)).results
    here = lab.launch(train, RANKS, args=(False,)).results
    for mine, first, expected in zip(there[-1], there[0], here[0], strict=True):
        torch.testing.assert_close(mine, first, rtol=0, atol=0)  # ranks agree bit by bit
        torch.testing.assert_close(first, expected, **CLOSE)


def sums() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = lab.device()
    x = torch.full((4,), float(rank), device=device)
    dist.all_reduce(x)
    gathered = [torch.empty(1, device=device) for _ in range(size)]
    dist.all_gather(gathered, torch.full((1,), float(rank), device=device))
    sent = torch.full((2,), 7.0 if rank == 1 else 0.0, device=device)
    dist.broadcast(sent, src=1)
    return [*x.tolist(), *(g.item() for g in gathered), *sent.tolist()]


def test_collectives() -> None:
    expected = [RANKS * (RANKS - 1) / 2] * 4 + [float(r) for r in range(RANKS)] + [7.0, 7.0]
    assert lab.launch(sums, RANKS).results == [expected] * RANKS


def test_a_run_is_measured_on_the_gpus() -> None:
    run = lab.launch(train, RANKS, args=(True,))
    trace = run.trace
    assert trace.source == "measured"
    assert torch.cuda.get_device_name(0) in trace.hardware
    for rank in range(RANKS):
        steps = [s for s in trace.of_rank(rank) if s.name == "step"]
        assert len(steps) == 3
        assert {s.device for s in steps} == {f"GPU {rank}"}
        assert all(a.end <= b.start for a, b in pairwise(steps))
        assert trace.peak_memory(f"GPU {rank}") > 0


def test_a_failure_names_the_rank() -> None:
    def fails() -> None:
        if dist.get_rank() == 1:
            torch.zeros(3, device=lab.device()) @ torch.zeros(4, device=lab.device())
        dist.barrier()

    with pytest.raises(lab.RankFailure, match="[Rr]ank 1"):
        lab.launch(fails, RANKS)
    assert lab.launch(dist.get_rank, RANKS).results == list(range(RANKS))


def test_a_watch_has_kernels_copies_and_memory() -> None:
    (device,) = lab.gpus(1)
    assert device.type == "cuda"
    model, (images, labels) = make_model().to(device), batch(0, 256)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with lab.watch("one step", show=False) as w, lab.span("step"):
        F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
    trace = w.trace
    assert (trace.source, trace.hardware) == ("measured", f"1 × {torch.cuda.get_device_name(0)}")
    lanes = {s.lane for s in trace.spans if s.device == "GPU 0"}
    assert {"compute", "copy"} <= lanes
    (step,) = [s for s in trace.spans if s.name == "step"]
    kernels = [s for s in trace.spans if s.device == "GPU 0" and s.lane == "compute"]
    assert min(s.start for s in kernels) >= step.start - 1e-3
    assert 0 < trace.peak_memory("GPU 0") <= torch.cuda.max_memory_allocated(0)


@pytest.mark.parametrize("call", ["memory_allocated", "max_memory_allocated"])
def test_virtual_gpus_count_as_real_ones(call: str) -> None:
    """The bytes of a virtual GPU are those of CUDA's allocator, of tensors in whole 512 bytes."""

    def held(device: torch.device, module: Any) -> int:
        before: int = getattr(module, call)(0)
        kept = [torch.empty(n, device=device) for n in (1, 1000, 10**6)]
        after: int = getattr(module, call)(0)
        del kept
        return after - before

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    real = held(torch.device("cuda", 0), torch.cuda)
    (virtual,) = lab.virtual.enable(1)
    assert held(virtual, torch.get_device_module("vgpu")) == real


@pytest.mark.skipif(GPUS < 2, reason="DataParallel over several GPUs needs two or more")
def test_data_parallel_has_the_gradients_of_one_device() -> None:
    def gradients(wrap: Callable[[nn.Module], nn.Module], device: str) -> list[torch.Tensor]:
        model = make_model()[3:].to(device)  # without batch norm, whose statistics are per shard
        images, labels = batch(1, 32)
        inputs = images.mean((2, 3), keepdim=True).repeat(1, 3, 1, 1)[:, :8].to(device)
        F.cross_entropy(wrap(model)(inputs), labels.to(device)).backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    devices = lab.gpus(GPUS)
    there = gradients(lambda m: nn.DataParallel(m, device_ids=devices), "cuda:0")
    for mine, expected in zip(there, gradients(lambda m: m, "cpu"), strict=True):
        torch.testing.assert_close(mine, expected, **CLOSE)
