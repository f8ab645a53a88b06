"""Copies between host and devices, their gradients, and reading values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from labutils.virtual.record import Copy
from tests.virtual_gpus import gpus, recorded


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(4) as module:
        yield module


def copies(action: Callable[[], Any]) -> list[tuple[str, Copy, int]]:
    """Name, direction and bytes of the copies that ``action`` makes."""
    with recorded() as entries:
        action()
    return [
        (e.kernel.name, e.ref, e.kernel.bytes_read)
        for e in entries
        if e.what == "copy" and e.kernel
    ]


def test_recorded_direction_bytes_and_blocking() -> None:
    x = torch.zeros(10)
    on_gpu = x.to("vgpu:1")
    pinned = x.pin_memory()
    assert copies(lambda: x.to("vgpu:2")) == [("h2d", Copy(-1, 2, False, True), 40)]
    assert copies(lambda: x.to("vgpu:2", non_blocking=True)) == [
        ("h2d", Copy(-1, 2, False, True), 40)
    ]
    assert copies(lambda: pinned.to("vgpu:2")) == [("h2d", Copy(-1, 2, True, True), 40)]
    assert copies(lambda: pinned.to("vgpu:2", non_blocking=True)) == [
        ("h2d", Copy(-1, 2, True, False), 40)
    ]
    assert copies(lambda: on_gpu.cpu()) == [("d2h", Copy(1, -1, False, True), 40)]
    assert copies(lambda: on_gpu.to("vgpu:3")) == [("p2p", Copy(1, 3, True, False), 40)]
    assert copies(lambda: on_gpu.sum().item())[-1] == ("d2h", Copy(1, -1, False, True), 4)
    assert copies(lambda: on_gpu.copy_(pinned, non_blocking=True)) == [
        ("h2d", Copy(-1, 1, True, False), 40)
    ]
    assert copies(lambda: on_gpu.to("vgpu:1")) == []


def test_to_returns_itself_where_nothing_changes() -> None:
    x = torch.zeros(2, device="vgpu:1")
    assert x.to("vgpu:1") is x
    assert x.to(torch.float32) is x
    assert x.to(x) is x
    assert x.to("vgpu:1", copy=True) is not x
    assert x.to("vgpu:1", torch.float64).dtype == torch.float64
    assert torch.zeros(1, device="vgpu:2").to(x).device == x.device
    with pytest.raises(AssertionError, match="CUDA"):
        x.to("cuda")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="vgpu:1"),
        lambda: torch.tensor([1.0, 2, 3], device="vgpu:1"),
        lambda: torch.as_tensor([1.0, 2, 3], device=torch.device("vgpu", 1)),
        lambda: torch.asarray([1.0, 2, 3], device="vgpu:1"),
        lambda: torch.from_numpy(np.ones(3)).to("vgpu:1"),
        lambda: torch.ones(3).vgpu(1),  # type: ignore[attr-defined]
        lambda: torch.randn(3, device="vgpu:1", requires_grad=True),
        lambda: torch.arange(3, device="vgpu:1"),
        lambda: torch.empty_like(torch.ones(3), device="vgpu:1"),
        lambda: nn.Linear(3, 1, device="vgpu:1").weight[0],
        lambda: nn.Linear(3, 1, device="meta").to_empty(device="vgpu:1").weight[0],
        lambda: nn.Linear(3, 1).vgpu(1).weight[0],  # type: ignore[operator]
    ],
)
def test_ways_to_make_a_tensor(make: Callable[[], torch.Tensor]) -> None:
    x = make()
    assert x.device == torch.device("vgpu:1")
    assert x.shape == (3,)
    assert (x.get_device(), x.is_cuda, x.is_cpu) == (1, False, False)


def test_current_and_default_device(vgpu: Any) -> None:
    with vgpu.device(2):
        assert torch.zeros(1, device="vgpu").device.index == 2
        assert torch.ones(1).to("vgpu").device.index == 2
    with torch.device("vgpu:3"):
        assert torch.tensor([1.0]).device.index == torch.randn(2).device.index == 3
    torch.set_default_device("vgpu:1")
    try:
        assert torch.tensor([1.0]).device.index == nn.Linear(2, 2).weight.device.index == 1
    finally:
        torch.set_default_device(None)
    assert torch.tensor([1.0]).device.type == "cpu"


def test_a_device_that_does_not_exist() -> None:
    for make in (lambda: torch.zeros(1, device="vgpu:9"), lambda: torch.ones(1).to("vgpu:9")):
        with pytest.raises(RuntimeError, match=r"invalid device ordinal.*vgpu:9.*4 virtual GPUs"):
            make()


def test_model_parallel_gradients_equal_cpu() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    plain = copy.deepcopy((first, second))
    x = torch.randn(5, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    first.to("vgpu:0")
    second.to("vgpu:1")
    second(first(x.to("vgpu:0")).to("vgpu:1")).cpu().pow(2).sum().backward()
    plain[1](plain[0](y)).pow(2).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert x.grad.device.type == "cpu"
    torch.testing.assert_close(x.grad, y.grad)
    for ours, theirs in zip((first, second), plain):
        assert ours.weight.grad is not None and theirs.weight.grad is not None
        torch.testing.assert_close(ours.weight.grad.cpu(), theirs.weight.grad)


@pytest.mark.parametrize("target", ["cpu", "vgpu:0", "vgpu:1"])
def test_gradient_through_copy_(target: str) -> None:
    a = torch.randn(3, device="vgpu:0", requires_grad=True)
    rows = torch.zeros(2, 3, device=target)
    rows[0].copy_(a * 2)
    rows[1] = a.to(target)
    (rows * rows).sum().backward()
    torch.testing.assert_close(a.grad, 10 * a.detach())


def test_gradient_through_a_change_of_type_and_twice() -> None:
    x = torch.randn(3, requires_grad=True)
    (x.to("vgpu:2", torch.float64) * 2).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    a = torch.randn(3, device="vgpu:1", requires_grad=True)
    (first,) = torch.autograd.grad((a.to("vgpu:3") ** 3).sum(), a, create_graph=True)
    first.sum().backward()
    torch.testing.assert_close(a.grad, 6 * a.detach())


def test_gradient_on_another_device_cannot_be_assigned() -> None:
    a = torch.zeros(3, device="vgpu:0", requires_grad=True)
    with pytest.raises(RuntimeError, match="different device"):
        a.grad = torch.zeros(3, device="vgpu:1")
    with pytest.raises(RuntimeError, match="different device"):
        a.grad = torch.zeros(3)
    a.grad = torch.ones(3, device="vgpu:0")
    a.grad = None


def test_moving_a_module_keeps_parameters_and_optimizer() -> None:
    model = nn.Linear(3, 1)
    weight, optimizer = model.weight, torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    for device in ("vgpu:0", "vgpu:2", "cpu"):
        model.to(device)
        assert model.weight is weight
        assert isinstance(weight, nn.Parameter)
        before = weight.detach().cpu().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 3, device=device)).sum().backward()
        optimizer.state.clear()
        optimizer.step()
        torch.testing.assert_close(weight.detach().cpu(), before - 1)


def test_data_can_be_replaced() -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.data = torch.zeros(5, device="vgpu:1")
    assert (parameter.device.index, parameter.shape) == (1, (5,))
    parameter.data = parameter.data.to("vgpu:2") + 1
    assert parameter.device.index == 2
    parameter.data = torch.ones(2)
    assert (parameter.device.type, float(parameter.sum())) == ("cpu", 2.0)
    assert parameter.requires_grad


def test_deepcopy_and_its_limits() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("vgpu:1")
    model(torch.randn(3, 2, device="vgpu:1")).sum().backward()
    made = copy.deepcopy(model)
    assert made[0].weight.data_ptr() != model[0].weight.data_ptr()
    assert torch.equal(made[0].weight.grad, model[0].weight.grad)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model[0].weight * 2)


def test_state_dict_across_devices() -> None:
    a, b = nn.Linear(3, 3).to("vgpu:0"), nn.Linear(3, 3).to("vgpu:2")
    b.load_state_dict(a.state_dict())
    assert b.weight.device.index == 2
    assert torch.equal(a.weight.cpu(), b.weight.cpu())
    c = nn.Linear(3, 3)
    c.load_state_dict(a.state_dict())
    assert torch.equal(a.weight.cpu(), c.weight)


def test_reading_values_and_numpy() -> None:
    x = torch.tensor([1.5, 2.0], device="vgpu:1")
    assert (x.tolist(), x[0].item(), float(x[1]), bool(x[0] > 1)) == ([1.5, 2.0], 1.5, 2.0, True)
    assert f"{x[0]:.2f}" == "1.50"
    assert repr(x) == "tensor([1.5000, 2.0000], device='vgpu:1')"
    assert "grad_fn=<MulBackward0>" in repr(x.requires_grad_() * 2)
    assert x.type() == "torch.vgpu.FloatTensor"
    message = r"can't convert vgpu:1 device type tensor to numpy\. Use Tensor\.cpu\(\)"
    with pytest.raises(TypeError, match=message):
        x.numpy()
    with pytest.raises(TypeError, match=message):
        np.asarray(x)
    with pytest.raises(BufferError, match="cpu"):
        np.from_dlpack(x)
    assert np.array_equal(x.detach().cpu().numpy(), [1.5, 2.0])


def test_as_tensor_keeps_the_graph_and_tensor_copies() -> None:
    x = torch.ones(2, device="vgpu:1", requires_grad=True)
    assert torch.as_tensor(x) is x
    assert torch.tensor(x).data_ptr() != x.data_ptr()


def test_pinning() -> None:
    x = torch.zeros(4)
    pinned = x.pin_memory()
    assert (x.is_pinned(), pinned.is_pinned(), pinned[1:].is_pinned()) == (False, True, True)
    assert pinned.pin_memory() is pinned
    with pytest.raises(RuntimeError, match=r"cannot pin.*vgpu:1"):
        torch.zeros(1, device="vgpu:1").pin_memory()


DATA = TensorDataset(torch.arange(10.0), torch.arange(10))


@pytest.mark.parametrize(
    ("workers", "method"), [(0, None), (2, "fork"), (1, "forkserver"), (1, "spawn")]
)
def test_data_loader(workers: int, method: str | None) -> None:
    loader = DataLoader(
        DATA, 4, num_workers=workers, pin_memory=True, multiprocessing_context=method
    )
    batches = [(x, x.to("vgpu:1", non_blocking=True), y) for x, y in loader]
    assert all(x.is_pinned() for x, _, _ in batches)
    assert torch.equal(torch.cat([x for _, x, _ in batches]).cpu(), torch.arange(10.0))
    assert all(moved.device.index == 1 for _, moved, _ in batches)


def test_random_numbers_can_be_repeated(vgpu: Any) -> None:
    for seed in (torch.manual_seed, vgpu.manual_seed, vgpu.manual_seed_all):
        seed(3)
        first = torch.randn(3, device="vgpu:1")
        seed(3)
        assert torch.equal(first, torch.randn(3, device="vgpu:1"))
    kept = vgpu.get_rng_state(1)
    first = torch.rand(2, device="vgpu:1")
    vgpu.set_rng_state(kept, 1)
    assert torch.equal(first, torch.rand(2, device="vgpu:1"))
    generator = torch.Generator(device="vgpu:2")
    assert generator.device == torch.device("vgpu:2")
    assert isinstance(torch.default_generator, torch.Generator)
    draws = [torch.randn(3, device="vgpu:2", generator=generator.manual_seed(5)) for _ in "ab"]
    assert torch.equal(draws[0], draws[1])
