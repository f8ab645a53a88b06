"""What virtual GPUs do not do is a sentence, and never a crash."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from labutils import virtual
from tests.virtual_gpus import gpus

DEV = "vgpu:1"


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(2) as module, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        yield module


def parts(device: str = "cpu") -> list[torch.Tensor]:
    return [torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)]


NESTED: dict[str, Callable[[], Any]] = {
    "made there": lambda: torch.nested.nested_tensor(parts(), device=DEV),
    "of virtual ones": lambda: torch.nested.nested_tensor(parts(DEV)),
    "as": lambda: torch.nested.as_nested_tensor(parts(DEV), layout=torch.jagged),
    "moved": lambda: torch.nested.nested_tensor(parts()).to(DEV),
    "jagged, moved": lambda: torch.nested.nested_tensor(parts(), layout=torch.jagged).to(DEV),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"no nested ones: .*to_padded_tensor"):
        NESTED[name]()


def test_nested_tensors_stay_on_the_cpu_and_can_be_padded() -> None:
    nested = torch.nested.nested_tensor(parts())
    assert "nested_tensor" in repr(nested)
    assert torch.nested.to_padded_tensor(nested, 0.0).to(DEV).shape == (2, 4, 3)


@pytest.mark.parametrize("compute", ["real", "phantom"])
def test_compiled_models_run_as_they_are(compute: str, vgpu: Any) -> None:
    virtual.enable(2, compute=compute)
    model = nn.Linear(3, 2).to(DEV)
    x = torch.ones(4, 3, device=DEV)
    with pytest.warns(UserWarning, match="torch.compile has no effect while"):
        compiled = torch.compile(model)
    assert compiled(x).shape == (4, 2) and compiled(x).device == x.device
    compiled(x).sum().backward()
    assert model.weight.grad is not None
    if compute == "real":
        assert torch.equal(compiled(x), model(x))


def test_what_was_compiled_before_runs_too_and_compiles_again_after() -> None:
    virtual.disable()
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    virtual.enable(2)
    assert double(torch.ones(2, device=DEV)).tolist() == [2.0, 2.0] and not seen
    virtual.disable()
    assert double(torch.ones(2)).tolist() == [2.0, 2.0] and len(seen) == 1
    virtual.enable(2)


OUT = "inv det slogdet cholesky eigvalsh svdvals lu_factor ldl_factor eigh qr svd"


@pytest.mark.parametrize("name", OUT.split())
@pytest.mark.parametrize("fits", [True, False])
def test_linear_algebra_into_given_tensors(name: str, fits: bool) -> None:
    function = getattr(torch.linalg, name)
    plain = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
    expected = function(plain)
    several = isinstance(expected, tuple)
    expected = tuple(expected) if several else (expected,)
    out = [torch.empty(t.shape if fits else 0, dtype=t.dtype, device=DEV) for t in expected]
    function(plain.to(DEV), out=tuple(out) if several else out[0])
    for have, want in zip(out, expected, strict=True):
        assert have.device == torch.device(DEV)
        assert torch.allclose(have.cpu(), want)


def test_a_transformer_that_would_use_nested_tensors_takes_the_other_way(vgpu: Any) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padded = torch.randn(2, 3, 16), torch.tensor([[False, False, True], [False] * 3])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padded)
        device = torch.device("vgpu", 0)
        found = encoder.to(device)(x.to(device), src_key_padding_mask=padded.to(device))
    torch.testing.assert_close(found.cpu()[~padded], expected[~padded])


def test_a_module_moves_under_inference_mode(vgpu: Any) -> None:
    device = torch.device("vgpu", 0)
    with torch.inference_mode():
        layer, x = nn.Linear(3, 2), torch.randn(4, 3)
        expected = layer(x)
        torch.testing.assert_close(layer.to(device)(x.to(device)).cpu(), expected)
