"""The ledger, against byte counts made by hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from labutils.virtual import dispatch
from labutils.virtual.memory import SEGMENT, Block, Ledger, size
from labutils.virtual.state import state
from tests.virtual_gpus import gpus

F32 = 4
BATCH, INPUTS, HIDDEN, CLASSES = 32, 20, 50, 10
PARAMETERS = (INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES) * F32


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(2) as module:
        yield module


def model() -> nn.Sequential:
    """20 → 50 → ReLU → 10."""
    layers = nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(*layers).to("vgpu:0")


@pytest.mark.parametrize(
    ("optimizer", "options", "state_bytes"),
    [
        ("SGD", {"lr": 0.1}, 0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, PARAMETERS),
        ("Adam", {}, 2 * PARAMETERS),
        ("Adam", {"foreach": False}, 2 * PARAMETERS),
        ("Adam", {"fused": True}, 2 * PARAMETERS + 4 * F32),  # its step counts are on the device
        ("AdamW", {"amsgrad": True}, 3 * PARAMETERS),
    ],
)
def test_training_step_by_hand(
    vgpu: Any, optimizer: str, options: dict[str, Any], state_bytes: int
) -> None:
    net = model()
    assert vgpu.memory_allocated(0) == PARAMETERS
    x = torch.randn(BATCH, INPUTS, device="vgpu:0")
    data = BATCH * INPUTS * F32
    update = getattr(torch.optim, optimizer)(net.parameters(), **options)
    for step in range(2):
        kept = 0 if step == 0 else state_bytes
        out = net(x)
        # ReLU keeps its own output, which the second layer keeps too; the first layer's is gone.
        activations = BATCH * HIDDEN * F32 + BATCH * CLASSES * F32
        assert vgpu.memory_allocated(0) == PARAMETERS + data + activations + kept
        loss = out.sum()
        assert vgpu.memory_allocated(0) == PARAMETERS + data + activations + F32 + kept
        loss.backward()
        gradients = PARAMETERS
        assert vgpu.memory_allocated(0) == (
            PARAMETERS + gradients + data + BATCH * CLASSES * F32 + F32 + kept
        )
        del out, loss
        update.step()
        assert vgpu.memory_allocated(0) == PARAMETERS + gradients + data + state_bytes
        update.zero_grad()
        assert vgpu.memory_allocated(0) == PARAMETERS + data + state_bytes


def test_views_count_once(vgpu: Any) -> None:
    x = torch.zeros(100, device="vgpu:1")
    part = x[:10].view(2, 5).t()
    assert vgpu.memory_allocated(1) == 400
    del x
    assert vgpu.memory_allocated(1) == 400, "a view keeps its base's memory"
    del part
    assert vgpu.memory_allocated(1) == 0


def test_resizing_counts_the_growth(vgpu: Any) -> None:
    x = torch.zeros(10, device="vgpu:0")
    x.resize_(100)
    assert vgpu.memory_allocated(0) == 400
    out = torch.empty(0, device="vgpu:0")
    torch.add(x, 1, out=out)
    assert vgpu.memory_allocated(0) == 800


def test_cycles_are_freed_by_the_collector(vgpu: Any) -> None:
    gc.disable()
    try:
        cycle: list[Any] = [torch.zeros(100, device="vgpu:0")]
        cycle.append(cycle)
        del cycle
        assert vgpu.memory_allocated(0) == 400
    finally:
        gc.enable()
    gc.collect()
    assert vgpu.memory_allocated(0) == 0


def test_peak_and_its_reset(vgpu: Any) -> None:
    a = torch.zeros(100, device="vgpu:0")
    b = torch.zeros(200, device="vgpu:0")
    del b
    assert (vgpu.memory_allocated(0), vgpu.max_memory_allocated(0)) == (400, 1200)
    vgpu.reset_peak_memory_stats(0)
    assert vgpu.max_memory_allocated(0) == 400
    c = a + 1
    assert vgpu.max_memory_allocated(0) == 800
    del c


def test_reserved_memory_stays_until_the_cache_is_emptied(vgpu: Any) -> None:
    vgpu.empty_cache()
    base = vgpu.memory_reserved(0)
    x = torch.zeros(3 * SEGMENT // 4, device="vgpu:0")
    assert vgpu.memory_reserved(0) == base + 3 * SEGMENT
    del x
    assert vgpu.memory_reserved(0) == base + 3 * SEGMENT
    free, total = vgpu.mem_get_info(0)
    assert total - free == base + 3 * SEGMENT
    vgpu.empty_cache()
    assert vgpu.memory_reserved(0) == base == 0
    assert vgpu.mem_get_info(0) == (total, total)


def test_statistics(vgpu: Any) -> None:
    before = vgpu.memory_stats(0)
    x = torch.zeros(100, device="vgpu:0")
    y = torch.zeros(50, device="vgpu:0")
    del y
    after = vgpu.memory_stats(0)

    def change(key: str) -> int:
        return int(after[key] - before[key])

    assert change("allocated_bytes.all.allocated") == 600
    assert change("allocated_bytes.all.freed") == 200
    assert change("allocation.all.allocated") == 2
    assert change("allocation.all.freed") == 1
    assert after["allocated_bytes.all.current"] == 400
    del x


def test_accelerator_tells_the_same(vgpu: Any) -> None:
    x = torch.zeros(100, device="vgpu:1")
    accelerator = torch.accelerator
    assert accelerator.device_count() == 2
    assert accelerator.is_available()
    assert accelerator.memory_allocated(1) == vgpu.memory_allocated(1) == 400
    assert accelerator.max_memory_allocated(1) == vgpu.max_memory_allocated(1)
    assert accelerator.memory_reserved(1) == vgpu.memory_reserved(1)
    assert accelerator.memory_stats(1) == vgpu.memory_stats(1)
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == vgpu.current_device() == 1
    with accelerator.device_index(0):
        assert vgpu.current_device() == 0
    accelerator.synchronize()
    accelerator.empty_cache()
    del x
    accelerator.reset_peak_memory_stats(1)
    assert vgpu.max_memory_allocated(1) == 0


def test_out_of_memory_says_asked_allocated_and_free() -> None:
    with gpus(1, profile="V100-SXM2-32GB") as vgpu:
        kept = torch.zeros(1 << 18, device="vgpu:0")
        total = vgpu.get_device_properties(0).total_memory
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(1 << 33, device="vgpu:0")
        text = str(caught.value)
        assert isinstance(caught.value, vgpu.OutOfMemoryError)
        assert "Tried to allocate 32.00 GiB" in text
        assert f"total capacity of {size(total)}" in text
        assert f"{size(total - (1 << 20))} is free" in text
        assert "1.00 MiB is allocated" in text
        assert vgpu.memory_allocated(0) == 1 << 20
        assert float((kept + 1).sum()) == 1 << 18, "the program goes on"
        del kept


@pytest.mark.parametrize("compute", ["real", "phantom"])
def test_going_over_capacity_in_the_middle_of_a_step_frees_everything(compute: str) -> None:
    with gpus(1, compute=compute) as vgpu:
        state.ledger.capacity[0] = 130_000
        layer = nn.Linear(100, 100, device="vgpu:0")
        kept = vgpu.memory_allocated(0)
        with pytest.raises(torch.OutOfMemoryError):
            layer(layer(torch.zeros(200, 100, device="vgpu:0")))
        gc.collect()
        assert vgpu.memory_allocated(0) == kept
        layer(torch.zeros(1, 100, device="vgpu:0")).sum().backward()
        assert vgpu.memory_stats(0)["num_ooms"] >= 1
        del layer


def test_ledger_refuses_without_counting() -> None:
    ledger = Ledger(1, 100)
    first = Block(ledger, 0, 60)
    with pytest.raises(torch.OutOfMemoryError):
        Block(ledger, 0, 41)
    with pytest.raises(torch.OutOfMemoryError):
        first.resize(101)
    assert ledger.allocated == [60]
    second = Block(ledger, 0, 30)
    second.resize(40)
    assert ledger.allocated == [100]
    del first, second
    assert (ledger.allocated, ledger.peak) == ([0], [100])


@pytest.mark.parametrize("place", ["_reserve", "_settle"])
def test_an_interrupt_within_the_ledger_leaves_the_sums_right(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(1, 10**9)
    kept, gone = Block(ledger, 0, 100), Block(ledger, 0, 50)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger, place, interrupt)
        del gone
        with pytest.raises(KeyboardInterrupt):
            Block(ledger, 0, 3 << 20)
    assert (ledger.allocated, ledger.allocations[0] - ledger.frees[0]) == ([100], 1)
    Block(ledger, 0, 7)
    assert ledger.allocated == [kept.nbytes]


@pytest.mark.parametrize("operation", range(4, 30, 5))
def test_a_backward_that_fails_frees_what_it_held(
    vgpu: Any, operation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(8, 1)).to("vgpu:0")
    loss = model(torch.ones(4, 8, device="vgpu:0")).sum()
    original, count = dispatch.dispatch, 0

    def interrupted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == operation:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    del loss
    model.zero_grad()
    gc.collect()
    tensors = (*model.parameters(), *model.buffers())
    assert vgpu.memory_allocated(0) == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(
    ("count", "text"), [(512, "0.50 KiB"), (3 << 20, "3.00 MiB"), (5 << 29, "2.50 GiB")]
)
def test_sizes_are_written_as_cuda_writes_them(count: int, text: str) -> None:
    assert size(count) == text
