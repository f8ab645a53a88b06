"""Mixed precision, against CUDA's lists (docs.pytorch.org/docs/stable/amp.html)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labutils import virtual
from tests.virtual_gpus import gpus, recorded

DEV = "vgpu:0"
LOW = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with gpus(2):
        yield


def x(*shape: int) -> torch.Tensor:
    return torch.rand(shape or (4, 4), device=DEV)


LOWERED: dict[str, Callable[[], torch.Tensor]] = {
    "matmul": lambda: x() @ x(),
    "mm": lambda: torch.mm(x(), x()),
    "bmm": lambda: torch.bmm(x(2, 3, 3), x(2, 3, 3)),
    "addmm": lambda: torch.addmm(x(), x(), x()),
    "baddbmm": lambda: torch.baddbmm(x(2, 3, 3), x(2, 3, 3), x(2, 3, 3)),
    "linear": lambda: F.linear(x(), x()),
    "conv1d": lambda: F.conv1d(x(1, 2, 5), x(3, 2, 3)),
    "conv2d": lambda: F.conv2d(x(1, 2, 5, 5), x(3, 2, 3, 3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(x(1, 2, 5, 5), x(2, 3, 3, 3)),
    "attention": lambda: F.scaled_dot_product_attention(*[x(1, 1, 4, 4)] * 3),
}  # fmt: skip
NAMES = "acos asin cosh exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan sum prod norm "
RAISED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in NAMES.split()},
    "pow": lambda t: t**2.5,
    "cumsum": lambda t: t.cumsum(0),
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: F.log_softmax(t, -1),
    "layer_norm": lambda t: F.layer_norm(t, (4,)),
    "group_norm": lambda t: F.group_norm(t, 2),
    "mse_loss": lambda t: F.mse_loss(t, t),
    "l1_loss": lambda t: F.l1_loss(t, t),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t, t),
    "cross_entropy": lambda t: F.cross_entropy(t, torch.zeros(4, dtype=torch.long, device=DEV)),
    "kl_div": lambda t: F.kl_div(t, t, reduction="sum"),
    "bce_with_logits": lambda t: F.binary_cross_entropy_with_logits(t, torch.ones_like(t)),
    "cosine_similarity": lambda t: F.cosine_similarity(t, t),
}  # fmt: skip
KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "add": lambda t: t + 1,
    "mul": lambda t: t * t,
    "max_pool": lambda t: F.max_pool1d(t, 2),
    "dropout": lambda t: F.dropout(t, 0.5),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", LOWERED)
def test_runs_in_low_precision(name: str, dtype: torch.dtype) -> None:
    with torch.autocast("vgpu", dtype):
        assert LOWERED[name]().dtype == dtype
    assert LOWERED[name]().dtype == torch.float32


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", RAISED)
def test_runs_in_float32(name: str, dtype: torch.dtype) -> None:
    with torch.autocast("vgpu", dtype):
        assert RAISED[name](x().to(dtype)).dtype == torch.float32


@pytest.mark.parametrize("name", KEPT)
def test_keeps_the_type_that_comes_in(name: str) -> None:
    with torch.autocast("vgpu", torch.bfloat16):
        assert KEPT[name](x().bfloat16()).dtype == torch.bfloat16
        assert KEPT[name](x()).dtype == torch.float32


def test_nested_disabled_and_decorated() -> None:
    @torch.autocast("vgpu", torch.float16)
    def decorated() -> torch.dtype:
        return (x() @ x()).dtype

    assert decorated() == torch.float16
    with torch.autocast("vgpu", torch.bfloat16):
        with torch.autocast("vgpu", enabled=False):
            assert (x() @ x()).dtype == torch.float32
            assert x().bfloat16().exp().dtype == torch.bfloat16
        assert decorated() == torch.float16
        assert (x() @ x()).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("vgpu")
    assert not torch.is_autocast_enabled("vgpu")
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype == torch.float32


def test_gradients_are_in_the_type_of_the_parameters() -> None:
    layer = nn.Linear(4, 4).to(DEV)
    with torch.autocast("vgpu", torch.bfloat16):
        loss = F.cross_entropy(layer(x()), torch.zeros(4, dtype=torch.long, device=DEV))
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_unsafe_loss_is_refused() -> None:
    with torch.autocast("vgpu", torch.float16), pytest.raises(RuntimeError, match="WithLogits"):
        F.binary_cross_entropy(x(), x())
    F.binary_cross_entropy(x(), x())


def test_gradient_scaler_skips_a_step_that_overflowed() -> None:
    layer = nn.Linear(2, 1, bias=False).to(DEV)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    scaler = torch.amp.GradScaler("vgpu", init_scale=1024.0)
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.full((1, 2), float("inf"), device=DEV)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    scaler.scale(layer(torch.ones(1, 2, device=DEV)).sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(layer.weight.grad, torch.ones(1, 2, device=DEV))
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(layer.weight.detach(), before - 0.5)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("pace", ["simulated", "wall"])
def test_a_scaler_steps_without_values(pace: str) -> None:
    virtual.enable(1, compute="phantom", pace=pace)
    model = torch.nn.Linear(4, 4).to("vgpu:0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("vgpu")
    with torch.autocast("vgpu", dtype=torch.float16):
        loss = model(torch.ones(2, 4, device="vgpu:0")).float().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    with recorded() as entries:
        scaler.step(optimizer)
    scaler.update()
    assert [e.kernel.name for e in entries if e.what == "copy" and e.kernel] == ["d2h"]
    assert any(e.phase == "optimizer" for e in entries)
