"""Equal replicas pass, and the first tensor that differs is named with ranks and amount."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labutils import launch
from labutils.replicas import ReplicasDiffer, check_replicas

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo ranks on Unix")


def build(where: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """A DDP model with batch statistics, and its optimizer, after two steps on unequal data."""
    torch.manual_seed(0)
    device = launch.device() if where == "vgpu" else torch.device("cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.Adam(ddp.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.randn(8, 4).to(device)).square().sum().backward()
        optimizer.step()
    return ddp, optimizer


def on_ranks(work: Callable[..., Any], ranks: int = 2) -> list[Any]:
    """What ``work`` returns, or the message of the ReplicasDiffer that it raises, per rank."""

    def told() -> Any:
        try:
            return work()
        except ReplicasDiffer as error:
            return f"differ: {error}"

    return launch.launch(told, ranks=ranks, record=False).results


@pytest.mark.parametrize("where", ["cpu", "vgpu"])
def test_equal_replicas_whose_buffers_differ(where: str) -> None:
    def work() -> list[str]:
        ddp, optimizer = build(where)
        before = check_replicas(ddp, optimizer)
        ddp.module.eval()
        dist.broadcast(ddp.module[1].running_mean, 0)
        dist.broadcast(ddp.module[1].running_var, 0)
        return [before, check_replicas(ddp)]

    results = on_ranks(work, ranks=3)
    assert results[0] == results[1] == results[2]
    before, after = results[0]
    # 6 parameters with step, exp_avg and exp_avg_sq each, and Adam's settings
    assert before.startswith("3 replicas are equal: 6 parameters and ")
    assert "1.running_mean (buffer, float32 (8,)) differs on" in before
    assert "that is normal between two passes" in before
    assert after == "3 replicas are equal: 6 parameters, and 3 buffers."


def test_buffers_that_nobody_makes_equal() -> None:
    def work() -> str:
        return check_replicas(build(broadcast_buffers=False)[0])

    assert "nothing here makes them equal again" in on_ranks(work)[1]


def test_first_difference_is_named_with_ranks_and_amount() -> None:
    def work() -> str:
        ddp, _ = build()
        if dist.get_rank() == 2:
            with torch.no_grad():
                ddp.module[0].bias[3] += 0.25
                ddp.module[2].bias += 1
        return check_replicas(ddp)

    text = on_ranks(work, ranks=4)
    assert text[0] == (
        "differ: 0.bias (parameter, float32 (8,)) differs on rank 2 from ranks 0, 1 and 3, "
        "by up to 0.25 in 1 of 8 elements; 2 differ in all."
    )
    assert text == [text[0]] * 4


def test_smallest_difference_and_not_a_number() -> None:
    def work() -> list[str]:
        found = []
        for value in (1e-7, float("nan")):
            model = nn.Linear(3, 1, bias=False)
            nn.init.ones_(model.weight)
            if dist.get_rank():
                model.weight.data[0, 1] += value
            with pytest.raises(ReplicasDiffer) as caught:
                check_replicas(model)
            found.append(str(caught.value))
        return found

    small, nan = on_ranks(work)[0]
    assert "differs on rank 1 from rank 0, by up to 1.2e-07 in 1 of 3" in small
    assert "by up to inf in 1 of 3" in nan


def test_zeros_of_different_sign_and_replicas_that_are_no_numbers() -> None:
    def work() -> list[str]:
        model = nn.Linear(3, 1, bias=False)
        nn.init.constant_(model.weight, -0.0 if dist.get_rank() else 0.0)
        with pytest.raises(ReplicasDiffer) as caught:
            check_replicas(model)
        nn.init.constant_(model.weight, float("nan"))
        return [str(caught.value), check_replicas(model)]

    zeros, nan = on_ranks(work)[0]
    assert "in bits only: by the sign of zeros" in zeros
    assert nan == (
        "2 replicas are equal: 1 parameters.  But 1 of them hold NaN or infinity; the first is "
        "weight (parameter, float32 (1, 3))."
    )


def test_wrong_arguments() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(TypeError, match=r"a model .* first, not SGD"):
        check_replicas(optimizer)  # type: ignore[arg-type]
    for wrong in ("adam", schedule):
        with pytest.raises(TypeError, match="second argument .* is an optimizer"):
            check_replicas(model, wrong)  # type: ignore[arg-type]


def test_optimizer_state_and_settings() -> None:
    def work() -> list[str]:
        ddp, optimizer = build()
        found = []
        for spoil in (
            lambda: optimizer.state[ddp.module[2].weight]["exp_avg"].mul_(2),
            lambda: optimizer.param_groups[0].update(lr=0.3),
        ):
            if dist.get_rank() == 1:
                spoil()
            with pytest.raises(ReplicasDiffer) as caught:
                check_replicas(ddp, optimizer)
            found.append(str(caught.value))
            check_replicas(ddp)  # the parameters themselves are equal
        return found

    state, setting = on_ranks(work)[0]
    assert "exp_avg of 2.weight (optimizer state, float32 (2, 8)) differs on rank 1" in state
    assert "rank 0 has lr of parameter group 0 (0.1), but rank 1 has lr" in setting


def test_different_models() -> None:
    def shapes() -> str:
        return check_replicas(nn.Linear(2 + dist.get_rank(), 1))

    def numbers() -> str:
        model = nn.Linear(2, 1, bias=dist.get_rank() == 0)
        nn.init.ones_(model.weight)
        return check_replicas(model)

    assert (
        "float32 (1, 2)), but rank 1 has weight (parameter, float32 (1, 3))"
        in (on_ranks(shapes)[0])
    )
    assert "the same number of tensors: 2 on rank 0, 1 on rank 1" in on_ranks(numbers)[0]


def test_without_a_group_and_without_values() -> None:
    assert check_replicas(nn.Linear(2, 1)) == (
        "There is one replica, of 2 parameters: nothing to compare."
    )
    with pytest.raises(ValueError, match="weight has a shape but no values"):
        check_replicas(nn.Linear(2, 1, device="meta"))
