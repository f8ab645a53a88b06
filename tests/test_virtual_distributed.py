"""``torch.distributed`` between real processes on virtual GPUs, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

from tests import virtual_ranks as ranks

WORLD = {"real": 3, "phantom": 2}


def run(compute: str, folder: Path) -> list[dict[str, Any]]:
    world = WORLD[compute]
    arguments = (world, compute, str(folder / "store"), str(folder))
    start_processes(ranks.run_all, arguments, nprocs=world, start_method="spawn")
    return [torch.load(folder / f"{compute}{r}.pt", weights_only=False) for r in range(world)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("real", tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("phantom", tmp_path_factory.mktemp("phantom"))


def value(results: list[dict[str, Any]], name: str, rank: int) -> Any:
    found = results[rank][name]
    assert not (isinstance(found, str) and found.startswith("ERROR")), found
    return found


def check(got: Any, expected: Any, rank: int) -> None:
    """Every tensor is on the rank's device, and has the expected values."""
    if isinstance(expected, list | tuple) and not _is_pair(expected):
        assert len(got) == len(expected)
        for a, b in zip(got, expected):
            check(a, b, rank)
    elif isinstance(expected, torch.Tensor):
        device, tensor = got
        assert device == f"vgpu:{rank}"
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-4)
    else:
        assert got == expected


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def full(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value))


# With three ranks that hold 1, 2 and 3: what each function of ``virtual_ranks`` returns.
EXPECTED: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda r: full(6),
    "all_reduce_max_async": lambda r: full(3),
    "future_of_all_reduce": lambda r: full(12),
    "broadcast": lambda r: full(2),
    "reduce": lambda r: full(6) if r == 0 else None,
    "all_gather": lambda r: [full(1), full(2), full(3)],
    "all_gather_into_tensor": lambda r: torch.tensor([1.0, 1, 2, 2, 3, 3]),
    "reduce_scatter": lambda r: full(6 * (r + 1)),
    "reduce_scatter_tensor": lambda r: full(6, 2),
    "gather": lambda r: [full(1), full(2), full(3)] if r == 0 else None,
    "scatter": lambda r: full(r + 1),
    "all_to_all": lambda r: [full(1 + 10 * r, 2), full(2 + 10 * r, 2), full(3 + 10 * r, 2)],
    "all_to_all_single": lambda r: torch.tensor([1.0, 2, 3]),
    "all_to_all_uneven": lambda r: torch.tensor(
        [float(o + 1) for o in range(3) for _ in range(1 + (r + o) % 2)]
    ),
    "send_and_receive": lambda r: [None, full(1), full(0)][r],
    "batch_isend_irecv": lambda r: full((r - 1) % 3 + 1),
    "barrier_and_objects": lambda r: [{"rank": 0}, {"rank": 1}, {"rank": 2}],
    "subgroup": lambda r: full(3),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("rank", range(3))
def test_collective(real: list[dict[str, Any]], name: str, rank: int) -> None:
    check(value(real, name, rank), EXPECTED[name](rank), rank)


def trained() -> list[torch.Tensor]:
    """The parameters after training one plain model on the whole batch."""
    model = ranks.small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in ranks.data(3):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("variant", ranks.VARIANTS)
def test_ddp_equals_one_process(real: list[dict[str, Any]], variant: str) -> None:
    expected = trained()
    tolerance = 1e-2 if variant == "fp16_hook" else 1e-5
    for rank in range(3):
        for (device, got), want in zip(value(real, f"ddp_{variant}", rank), expected):
            assert device == f"vgpu:{rank}"
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_ddp_stays_on_the_device(real: list[dict[str, Any]]) -> None:
    assert value(real, "copies_in_backward", 0) == []


def test_zero_redundancy_optimizer(real: list[dict[str, Any]]) -> None:
    check(value(real, "zero_optimizer", 1), trained(), 1)


def test_no_sync_accumulates(real: list[dict[str, Any]]) -> None:
    model = ranks.small()
    for batch in ranks.data(3):
        model(batch).pow(2).mean().backward()
    # Gradients of the first batch stay each rank's own until the second is averaged with them.
    check(value(real, "no_sync", 2), [p.grad for p in model.parameters()], 2)


def test_join_with_uneven_inputs(real: list[dict[str, Any]]) -> None:
    assert [value(real, "uneven_join", r)[0] for r in range(3)] == [1, 2, 3]
    # In its last step rank 2 is alone, and its gradient is still divided by all three.
    model = ranks.small()
    (model(ranks.data(3, steps=3)[2, :2]).sum() / 3).backward()
    check(value(real, "uneven_join", 2)[1], [p.grad for p in model.parameters()], 2)


def test_sync_batch_norm_equals_one_big_batch(real: list[dict[str, Any]]) -> None:
    model = ranks.small(norm=True)
    x = ranks.data(3)[0].requires_grad_()
    out = model(x)
    out.pow(2).sum().div(9).backward()
    norm: Any = model[1]
    for rank in range(3):
        mine = slice(2 * rank, 2 * rank + 2)
        y, grad, grads, mean, var = value(real, "sync_batch_norm", rank)
        check(y, out[mine].detach(), rank)
        assert x.grad is not None
        check(grad, x.grad[mine] * 3, rank)
        check(grads, [p.grad for p in model.parameters()], rank)
        check(mean, norm.running_mean, rank)
        check(var, norm.running_var, rank)


def test_sync_batch_norm_with_uneven_batches(real: list[dict[str, Any]]) -> None:
    expected = nn.BatchNorm2d(3)(ranks.data(3)[0]).detach().split([1, 2, 3])
    for rank in range(3):
        check(value(real, "uneven_sync_batch_norm", rank), expected[rank], rank)


# ----------------------------------------------------------------------------------- phantom ranks


@pytest.mark.parametrize(
    "name", [n for n in EXPECTED if n not in ("subgroup", "barrier_and_objects")]
)
def test_phantom_collective_keeps_shape_and_device(
    phantom: list[dict[str, Any]], name: str
) -> None:
    for rank in range(2):
        found = value(phantom, name, rank)
        for device, shape in filter(None, found if isinstance(found, list) else [found]):
            assert device == f"vgpu:{rank}"
            assert shape in ((4,), (2,), (3,))


def test_phantom_resnet_step_is_recorded_alike_on_every_rank(
    phantom: list[dict[str, Any]],
) -> None:
    first, second = (value(phantom, "resnet_step", rank) for rank in range(2))
    assert first == second
    reduced = [e for e in first if e[0] == "all_reduce"]
    assert sum(e[4] for e in reduced) == 25_557_032 * 4
    assert all(e[1] == (0, 1) for e in first)
    assert len({(e[2], e[3]) for e in first}) == len(first)


def test_phantom_communication_hook(phantom: list[dict[str, Any]]) -> None:
    shapes = [tuple(p.shape) for p in ranks.small().parameters()]
    assert [shape for _, shape in value(phantom, "phantom_hook", 1)] == shapes


def test_phantom_sync_batch_norm(phantom: list[dict[str, Any]]) -> None:
    (device, shape), gradients = value(phantom, "phantom_sync_batch_norm", 1)
    assert (device, shape[0]) == ("vgpu:1", 2)
    shapes = [tuple(p.shape) for p in ranks.small(norm=True).parameters()]
    assert [shape for _, shape in gradients] == shapes
