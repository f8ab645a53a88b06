"""The five kernels of SyncBatchNorm, which PyTorch has for GPUs only, in plain PyTorch.

Statistics run over every dimension but the second (channels), in float32.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules import _functions

from labutils.virtual import journal
from labutils.virtual.dispatch import run
from labutils.virtual.operators import HANDLERS, operator_of

aten = torch.ops.aten


def _other_dims(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view([-1 if d == 1 else 1 for d in range(like.dim())])


def stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation of this rank's batch, each of shape (channels,)."""
    values = x.float()
    variance, mean = torch.var_mean(values, _other_dims(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


def gather_stats_with_counts(
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation over all ranks, weighted by ``counts``.

    Args:
        mean, invstd: of shape (ranks, channels).
        counts: elements per channel that each rank has, of shape (ranks,).
        running_mean, running_var: updated in place with the unbiased variance.
    """
    weights = counts.to(mean.dtype).view(-1, 1)
    total = weights.sum()
    overall = (mean * weights).sum(0) / total
    variances = 1 / invstd**2 - eps + (mean - overall) ** 2
    variance = (variances * weights).sum(0) / total
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(overall.to(running_mean.dtype), momentum)
        unbiased = variance * total / (total - 1)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return overall, torch.rsqrt(variance + eps)


def elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The normalised input, scaled and shifted."""
    out = (x.float() - _per_channel(mean, x)) * _per_channel(invstd, x)
    if weight is not None:
        out = out * _per_channel(weight.float(), x)
    if bias is not None:
        out = out + _per_channel(bias.float(), x)
    return out.to(x.dtype)


def backward_reduce(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of the gradient and of its product with the centred input; weight and bias gradients."""
    dims = _other_dims(x)
    gradient = grad.float()
    sum_dy = gradient.sum(dims)
    sum_dy_xmu = (gradient * (x.float() - _per_channel(mean, x))).sum(dims)
    dtype = weight.dtype if weight is not None else torch.float32
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def backward_elemt(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the input, from the sums over all ranks and the elements of all ranks."""
    total = count.sum()
    centred = x.float() - _per_channel(mean, x)
    correction = _per_channel(sum_dy_xmu / total * invstd**2, x)
    out = grad.float() - _per_channel(sum_dy / total, x) - centred * correction
    scale = invstd if weight is None else invstd * weight.float()
    return (out * _per_channel(scale, x)).to(x.dtype)


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` on the wrapped tensors as one operator."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(operator_of(func), args, kwargs, implementation=function)

    return handler


_KERNELS: Sequence[tuple[Any, Callable[..., Any]]] = (
    (aten.batch_norm_stats, stats),
    (aten.batch_norm_gather_stats_with_counts, gather_stats_with_counts),
    (aten.batch_norm_elemt, elemt),
    (aten.batch_norm_backward_reduce, backward_reduce),
    (aten.batch_norm_backward_elemt, backward_elemt),
)
for _packet, _function in _KERNELS:
    HANDLERS[_packet] = _kernel(_function)


class _Counting(threading.local):
    """Whether this thread is in the forward of a SyncBatchNorm."""

    on = False


_counting = _Counting()


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing; SyncBatchNorm's mask of the ranks with a batch, without values, takes all ranks.

    (Its result depends on values, which phantom compute does not have; that a rank has no samples
    at all would be the exception.)
    """
    tensor, indices = args[:2]
    if not (_counting.on and tensor.raw.is_meta and _is_mask(indices)):
        return run(operator_of(func), args, kwargs)
    journal.note("sync", tensor.index)
    return run(operator_of(aten.clone.default), (tensor,), {})


def _is_mask(indices: Sequence[Any]) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool


HANDLERS[aten.index] = _index


def install() -> None:
    """Let the forward of SyncBatchNorm be known as such."""
    original = _functions.SyncBatchNorm.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _counting.on = True
        try:
            return original(*args, **kwargs)
        finally:
            _counting.on = False

    _functions.SyncBatchNorm.forward = staticmethod(forward)  # type: ignore[method-assign]
