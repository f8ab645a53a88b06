"""Unmodified ``nn.DataParallel`` and the functions below it, against one plain CPU model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import parallel
from torch.nn.parallel import comm

from labutils.virtual.state import state
from tests.virtual_gpus import gpus, nbytes, recorded


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(4) as module:
        yield module


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("device_ids", [None, [0], [0, 1], [0, 3, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("batch", [8, 7, 2, 1])
def test_outputs_and_gradients_equal_cpu(device_ids: list[int] | None, batch: int) -> None:
    plain = net()
    model = copy.deepcopy(plain).to("vgpu:0")
    x = torch.randn(batch, 5)
    wrapped = nn.DataParallel(model, device_ids)
    assert wrapped.device_ids == (device_ids or [0, 1, 2, 3])
    out, expected = wrapped(x), plain(x)
    assert out.device == torch.device("vgpu:0")
    torch.testing.assert_close(out.cpu(), expected)
    out.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        assert a.grad is not None
        assert a.grad.device == torch.device("vgpu:0")
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_first_device_may_be_any_and_output_elsewhere() -> None:
    plain = net()
    model = copy.deepcopy(plain).to("vgpu:2")
    x = torch.randn(6, 5)
    wrapped = nn.DataParallel(model, device_ids=[2, 0, 1], output_device=3)
    out = wrapped(x)
    assert out.device == torch.device("vgpu:3")
    out.sum().backward()
    plain(x).sum().backward()
    assert model[0].weight.grad.device == torch.device("vgpu:2")
    torch.testing.assert_close(model[0].weight.grad.cpu(), plain[0].weight.grad)


def test_steps_of_training_follow_the_cpu() -> None:
    plain = net()
    model = copy.deepcopy(plain).to("vgpu:0")
    wrapped: nn.Module = nn.DataParallel(model)
    for _ in range(3):
        x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
        for module, target, parameters in (
            (wrapped, y.to("vgpu:0"), model),
            (plain, y, plain),
        ):
            optimizer = torch.optim.SGD(parameters.parameters(), 0.1)
            optimizer.zero_grad()
            F.cross_entropy(module(x), target).backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a.cpu(), b)


def test_batch_norm_statistics_come_from_the_first_replica() -> None:
    norm = nn.BatchNorm1d(3)
    alone = copy.deepcopy(norm)
    x = torch.randn(8, 3)
    wrapped = nn.DataParallel(norm.to("vgpu:0"))
    wrapped(x)
    alone(x[:2])
    torch.testing.assert_close(norm.running_mean.cpu(), alone.running_mean)
    torch.testing.assert_close(norm.running_var.cpu(), alone.running_var)
    assert int(norm.num_batches_tracked) == 1


def test_state_changed_in_forward_is_lost() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.weight

    model = Counting().to("vgpu:0")
    nn.DataParallel(model)(torch.ones(4, 1))
    assert model.count == 0
    nn.DataParallel(model, [0])(torch.ones(4, 1))
    assert model.count == 1


def test_scalar_losses_are_gathered_to_a_vector_with_a_warning() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).mean()

    x = torch.arange(8.0)
    with pytest.warns(UserWarning, match="gather along dimension 0"):
        losses = nn.DataParallel(Loss().to("vgpu:0"))(x)
    torch.testing.assert_close(losses.cpu(), x.view(4, 2).mean(1))


def test_nested_inputs_and_keywords() -> None:
    class Nested(nn.Module):
        def forward(self, pair: Any, *, scale: Any, name: str) -> dict[str, Any]:
            assert name == "kept"
            where = pair["a"].device
            assert scale[0].device == where
            return {"sum": pair["a"] + pair["b"][0], "scaled": [pair["a"] * scale[0]]}

    a, b, scale = torch.randn(6, 2), torch.randn(6, 2), torch.randn(6, 1)
    out = nn.DataParallel(Nested(), [0, 1, 2])({"a": a, "b": (b,)}, scale=[scale], name="kept")
    torch.testing.assert_close(out["sum"].cpu(), a + b)
    torch.testing.assert_close(out["scaled"][0].cpu(), a * scale)


def test_error_in_a_replica_names_replica_and_device() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.get_device() == 2:
                raise ValueError("two is broken")
            return x

    with pytest.raises(ValueError, match="two is broken") as caught:
        nn.DataParallel(Failing())(torch.ones(8, 1))
    assert "Caught ValueError in replica 2 on device 2" in str(caught.value)


def test_module_on_the_wrong_device() -> None:
    with pytest.raises(RuntimeError, match=r"must have its parameters.*on device vgpu:0.*vgpu:1"):
        nn.DataParallel(net().to("vgpu:1"), [0, 1])(torch.randn(4, 5))


def test_without_gradients_nothing_is_kept() -> None:
    model = nn.DataParallel(net().to("vgpu:0"))
    parameters = nbytes(*model.parameters())
    with torch.no_grad():
        out = model(torch.randn(8, 5))
    assert not out.requires_grad
    assert state.ledger.allocated[0] == parameters + nbytes(out)
    assert state.ledger.allocated[1:4] == [0, 0, 0]


def test_memory_of_each_gpu_by_hand(vgpu: Any) -> None:
    model = nn.Linear(100, 10, bias=False).to("vgpu:0")
    wrapped = nn.DataParallel(model, [0, 1])
    out = wrapped(torch.randn(8, 100))
    weight, half_input, half_output = 4000, 4 * 100 * 4, 4 * 10 * 4
    # The second GPU keeps its part of the batch for backward.  Its replica is gone, since nothing
    # needs the gradient of the batch; and so is its part of the output, once gathered.
    assert vgpu.memory_allocated(1) == half_input
    assert vgpu.memory_allocated(0) == weight + half_input + 2 * half_output
    out.sum().backward()
    del out
    assert vgpu.memory_allocated(1) == 0
    assert vgpu.memory_allocated(0) == 2 * weight


def test_functional_data_parallel() -> None:
    model, x = net(), torch.randn(8, 5)
    expected = model(x).detach()
    got = parallel.data_parallel(model.to("vgpu:0"), x.to("vgpu:0"), [0, 1], output_device=1)
    assert got.device == torch.device("vgpu:1")
    torch.testing.assert_close(got.cpu(), expected)


def test_the_four_steps_by_hand() -> None:
    model, x = net(), torch.randn(6, 5)
    expected = model(x)
    expected.sum().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    model.to("vgpu:0")
    replicas = parallel.replicate(model, [0, 1, 2])
    assert [r[0].weight.device.index for r in replicas] == [0, 1, 2]
    inputs = parallel.scatter(x, [0, 1, 2])
    assert [t.shape[0] for t in inputs] == [2, 2, 2]
    outputs = parallel.parallel_apply(replicas, inputs, devices=[0, 1, 2])
    gathered = parallel.gather(outputs, 1)
    assert gathered.device == torch.device("vgpu:1")
    torch.testing.assert_close(gathered.cpu(), expected)
    gathered.sum().backward()
    torch.testing.assert_close(model[0].weight.grad.cpu(), gradient)


def test_gather_to_the_cpu_and_along_another_dimension() -> None:
    parts = [torch.full((2, i + 1), float(i), device=f"vgpu:{i}") for i in range(3)]
    got = parallel.gather(parts, "cpu", dim=1)
    assert got.device.type == "cpu"
    assert torch.equal(got[0], torch.tensor([0.0, 1, 1, 2, 2, 2]))


@pytest.mark.parametrize("buffer_size", [1, 64, 1 << 20])
def test_broadcast_coalesced(buffer_size: int) -> None:
    tensors = [torch.randn(n, device="vgpu:1") for n in (3, 50, 7)]
    tensors.append(torch.arange(4, device="vgpu:1"))
    copies = comm.broadcast_coalesced(tensors, [1, 0, 3], buffer_size)
    assert [[t.device.index for t in column] for column in copies] == [[1] * 4, [0] * 4, [3] * 4]
    for column in copies:
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(column, tensors))
    assert copies[0][0].data_ptr() == tensors[0].data_ptr()


def test_broadcast_and_reduce_add() -> None:
    x = torch.randn(3, device="vgpu:0")
    copies = comm.broadcast(x, [0, 1, 2])
    assert [t.device.index for t in copies] == [0, 1, 2]
    total = comm.reduce_add([t * (i + 1) for i, t in enumerate(copies)], 1)
    assert total.device.index == 1
    torch.testing.assert_close(total.cpu(), x.cpu() * 6)
    with pytest.raises(RuntimeError, match="destination"):
        comm.reduce_add(list(copies), 3)


def test_scatter_sizes_dimension_and_out() -> None:
    x = torch.arange(12.0).view(3, 4)
    parts = comm.scatter(x, [0, 1], chunk_sizes=[1, 3], dim=1)
    assert [tuple(p.shape) for p in parts] == [(3, 1), (3, 3)]
    assert torch.equal(parts[1].cpu(), x[:, 1:])
    out = [torch.empty(1, 4, device="vgpu:2"), torch.empty(2, 4, device="vgpu:3")]
    comm.scatter(x, out=out)
    assert torch.equal(out[1].cpu(), x[1:])


def test_communication_is_recorded_with_its_bytes() -> None:
    model = nn.Linear(100, 10).to("vgpu:0")
    weights = nbytes(*model.parameters())
    wrapped = nn.DataParallel(model)
    x = torch.randn(8, 100)
    with recorded() as entries, warnings.catch_warnings():
        wrapped(x).sum().backward()
    collectives = [e for e in entries if e.what == "collective"]
    assert [e.ref.op for e in collectives] == ["broadcast", "reduce"]
    assert [e.kernel.bytes_read for e in collectives if e.kernel] == [weights, weights]
    assert all(set(e.ref.devices) == {0, 1, 2, 3} for e in collectives)
    copies = [e for e in entries if e.what == "copy" and e.kernel]
    inward = [e for e in copies if e.kernel and e.kernel.name == "h2d"]
    assert [e.kernel.bytes_read for e in inward if e.kernel] == [nbytes(x) // 4] * 4
    gathered = [e for e in copies if e.ref.target == 0 and e.ref.source > 0]
    assert len(gathered) == 3
    assert sum(e.kernel.bytes_read for e in gathered if e.kernel) == 3 * 2 * 10 * 4


def test_without_gpus_it_splits_nothing() -> None:
    from labutils import virtual

    virtual.disable()
    wrapped = nn.DataParallel(net())
    assert wrapped(torch.randn(3, 5)).device.type == "cpu"
    assert wrapped.device_ids == []


def test_autocast_reaches_the_replicas() -> None:
    wrapped = nn.DataParallel(nn.Linear(4, 4).to("vgpu:0"))
    with torch.autocast("vgpu", torch.bfloat16):
        out, alone = wrapped(torch.ones(8, 4)), wrapped.module(torch.ones(2, 4, device="vgpu:0"))
    # PyTorch tells the replicas' threads that autocast is on, not in which type: they take float16.
    assert (out.dtype, alone.dtype) == (torch.float16, torch.bfloat16)
