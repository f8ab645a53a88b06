"""Mixed precision: ``torch.autocast("vgpu", dtype)`` casts as ``torch.autocast("cuda", dtype)``.

To PyTorch's C++ a virtual tensor is a CPU tensor, so its autocast for the CPU is switched on along
with it: that runs matrix products, convolutions and attention in the low precision.  What CUDA
keeps in float32 beyond that (softmax, losses, exp, pow, …) is cast by a function mode.
Source of the list: docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.amp import autocast_mode
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode

from labutils.virtual import copies
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor

_POINTWISE = (
    "acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 pow reciprocal rsqrt "
    "cumprod cumsum dist norm prod sum softmax log_softmax renorm"
)
_FUNCTIONAL = (
    "softmax log_softmax softmin layer_norm group_norm normalize cosine_similarity softplus "
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div cosine_embedding_loss "
    "hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "poisson_nll_loss soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits"
)


def _float32_functions() -> set[Any]:
    found = {getattr(F, name) for name in _FUNCTIONAL.split()}
    for name in _POINTWISE.split():
        found |= {getattr(torch, name, None), getattr(torch.Tensor, name, None)}
    found |= {torch.Tensor.__pow__, torch.Tensor.__rpow__, torch.Tensor.__rdiv__}
    return found - {None}


class _Float32(TorchFunctionMode):
    """Casts the virtual tensors among the arguments of float32 functions to float32."""

    functions = _float32_functions()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.binary_cross_entropy and torch.is_autocast_enabled("vgpu"):
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
                "autocast. Use torch.nn.functional.binary_cross_entropy_with_logits or "
                "torch.nn.BCEWithLogitsLoss, which combine them with a sigmoid safely."
            )
        if func in self.functions and torch.is_autocast_enabled("vgpu"):
            args = tuple(map(_to_float32, args))
            kwargs = {k: _to_float32(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _to_float32(value: Any) -> Any:
    if type(value) is VirtualTensor and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def install() -> None:
    """Replace ``torch.autocast``'s entry and exit, and make ``is_autocast_enabled()`` see vgpu."""
    cls = autocast_mode.autocast
    cls.__enter__ = _entering(cls.__enter__)  # type: ignore[method-assign]
    cls.__exit__ = _leaving(cls.__exit__)  # type: ignore[method-assign]
    _replace_scaler()
    is_enabled = torch.is_autocast_enabled

    @functools.wraps(is_enabled)
    def is_autocast_enabled(*args: Any) -> bool:
        # nn.DataParallel asks without a device, meaning the GPU that is there.
        return is_enabled(*(args or ("vgpu",))) if state.devices else is_enabled(*args)

    torch.is_autocast_enabled = is_autocast_enabled  # type: ignore[assignment]


def _replace_scaler() -> None:
    """``GradScaler.step`` without values: the host reads that no gradient is infinite."""
    original = GradScaler._maybe_opt_step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, found: Any, *args: Any, **kwargs: Any) -> Any:
        infinite: Any = list(found["found_inf_per_device"].values())
        if not all(type(t) is VirtualTensor and t.raw.is_meta for t in infinite):
            return original(self, optimizer, found, *args, **kwargs)
        for tensor in infinite:
            copies.record_copy(tensor, copies.HOST, pinned=False, blocking=True)
        return optimizer.step(*args, **kwargs)

    GradScaler._maybe_opt_step = step  # type: ignore[method-assign, assignment]


def _entering(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        result = original(self)
        if self.device == "vgpu":
            self._vgpu_cpu = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
            torch.set_autocast_enabled("cpu", self._enabled)
            torch.set_autocast_dtype("cpu", self.fast_dtype)
            self._vgpu_mode = _Float32() if self._enabled else contextlib.nullcontext()
            self._vgpu_mode.__enter__()
        return result

    return enter


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> Any:
        if self.device == "vgpu":
            self._vgpu_mode.__exit__(*error)
            enabled, dtype = self._vgpu_cpu
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
        return original(self, *error)

    return leave
