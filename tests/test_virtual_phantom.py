"""Phantom compute: shapes, memory and the log of the real thing, and no values."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labutils import models, virtual
from tests.virtual_gpus import gpus, recorded

DEV = "vgpu:1"


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(2, compute="phantom") as module:
        yield module


def test_resnet50_at_batch_256(vgpu: Any) -> None:
    model = models.create("resnet50").to("vgpu:0")
    parameters = 25_557_032 * 4
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert vgpu.memory_allocated(0) == parameters + buffers
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(256, 3, 224, 224, device="vgpu:0")
    y = torch.randint(0, 1000, (256,), device="vgpu:0")
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    images = 256 * 3 * 224 * 224 * 4 + 256 * 8
    assert vgpu.memory_allocated(0) == 3 * parameters + buffers + images
    assert 20 < vgpu.max_memory_allocated(0) / 2**30 < 24


def trace(compute: str) -> tuple[list[Any], list[int], list[int]]:
    """What a step of a small model writes to the log, and its memory."""
    virtual.enable(2, compute=compute)
    module: Any = torch.get_device_module("vgpu")
    torch.manual_seed(0)
    model = models.create("resnet_small").to("vgpu:0")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 3, 32, 32, device="vgpu:0")
    y = torch.randint(0, 10, (4,), device="vgpu:0")
    module.reset_peak_memory_stats(0)
    with recorded() as entries:
        F.cross_entropy(nn.DataParallel(model)(x), y).backward()
        optimizer.step()
    kernels = sorted((e.device, e.kernel) for e in entries if e.kernel)
    peaks = [module.max_memory_allocated(0)]
    left = [module.memory_allocated(i) for i in range(2)]
    del model, optimizer, x, y
    gc.collect()
    return kernels, peaks, left


def test_log_and_memory_equal_real_compute() -> None:
    real, phantom = trace("real"), trace("phantom")
    assert phantom[0] == real[0]
    assert phantom[2] == real[2]


def test_peak_equals_real_compute() -> None:
    peaks = []
    for compute in ("real", "phantom"):
        virtual.enable(2, compute=compute)
        module: Any = torch.get_device_module("vgpu")
        model = models.create("resnet_small").to(DEV)
        module.reset_peak_memory_stats(1)
        model(torch.randn(4, 3, 32, 32, device=DEV)).sum().backward()
        peaks.append(module.max_memory_allocated(1))
        del model
        gc.collect()
    assert peaks[0] == peaks[1] > 0


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy to cpu": lambda x: torch.zeros(3).copy_(x),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "allclose": lambda x: torch.allclose(x, x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"needs values.*compute='phantom'.*compute='real'"):
        REFUSED[name](torch.ones(3, device=DEV))


WORKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "set by mask": lambda x: x.__setitem__(x > 0, 0.0),
    "index on the CPU": lambda x: x[torch.tensor([1, 2])],
    "index": lambda x: x[torch.tensor([1, 2], device=DEV)],
    "scalar on the CPU": lambda x: x * torch.tensor(2.0),
    "deepcopy": copy.deepcopy,
    "state_dict": lambda x: nn.Linear(2, 2).to(DEV).load_state_dict(nn.Linear(2, 2).state_dict()),
    "lstm": lambda x: nn.LSTM(4, 5).to(DEV)(torch.randn(3, 2, 4, device=DEV))[0].sum().backward(),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[torch.randn(2, 2, 8, 4, device=DEV)] * 3, is_causal=True, dropout_p=0.1
    ),
    "one_hot": lambda x: F.one_hot(torch.tensor([1, 2], device=DEV), 5),
}


@pytest.mark.parametrize("name", WORKS)
def test_works_without_values(name: str) -> None:
    WORKS[name](torch.ones(3, device=DEV))


def test_printing() -> None:
    x = torch.ones(3, device=DEV)
    assert repr(x) == "tensor(..., size=(3,), dtype=torch.float32, phantom, device='vgpu:1')"
    assert f"{x[0]}" and f"{x[0]:.2f}"


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_optimizers(name: str, options: dict[str, Any]) -> None:
    model = nn.Linear(3, 2).to(DEV)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3, device=DEV)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_repeated_calls_answer_for_their_own_shapes() -> None:
    for size in (2, 3, 2):
        x = torch.ones(size, 4, device=DEV)
        assert (x @ x.t()).shape == (size, size)
        assert (x.double() * 2).dtype == torch.float64


def test_wrong_shapes_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"reduction dim|mat1 and mat2"):
            torch.ones(2, 3, device=DEV) @ torch.ones(2, 3, device=DEV)


def test_real_and_phantom_tensors_do_not_mix() -> None:
    virtual.enable(2, compute="real")
    real = torch.ones(3, device=DEV)
    virtual.enable(2, compute="phantom")
    with pytest.raises(RuntimeError, match=r"compute='real'.*compute='phantom'.*again"):
        real + torch.ones(3, device=DEV)
