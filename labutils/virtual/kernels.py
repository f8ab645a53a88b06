"""What one ATen call costs: its class, floating-point operations and bytes, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from labutils.virtual.record import Kernel

Signature = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and element type of a tensor."""

_KINDS = {
    "gemm": "mm addmm bmm baddbmm addbmm linear mv addmv dot vdot mkldnn_rnn_layer "
    "mkldnn_rnn_layer_backward",
    "conv": "convolution convolution_backward _convolution",
    "norm": "native_batch_norm native_batch_norm_backward native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward batch_norm_stats "
    "batch_norm_elemt batch_norm_backward_reduce batch_norm_backward_elemt "
    "batch_norm_gather_stats_with_counts _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _fused_rms_norm _fused_rms_norm_backward",
    "reduction": "sum mean max min amax amin argmax argmin prod var var_mean std norm "
    "linalg_vector_norm logsumexp any all topk sort cumsum nll_loss_forward _softmax _log_softmax "
    "_softmax_backward_data _log_softmax_backward_data nonzero median mse_loss",
    "view": "empty empty_strided empty_like new_empty new_empty_strided detach lift_fresh "
    "_unsafe_view _reshape_alias resize_ set_",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_GATHERS = {"embedding", "index_select", "gather", "index", "take"}
"""Read only the rows that they pick, not the whole table."""
_FILLS = {"zero_", "fill_", "uniform_", "normal_", "bernoulli_", "random_", "copy_"}
"""Overwrite their first argument without reading it."""


def kind_of(name: str) -> str:
    """The class of ATen operator ``name`` for the cost model (see :class:`Kernel`)."""
    if name in _KIND_OF:
        return _KIND_OF[name]
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return "attention"
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach")):
        return "optimizer"
    return "elementwise"


def describe(
    func: OpOverload,
    name: str,
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[Signature],
    outputs: Sequence[Signature],
    written: Sequence[Signature],
    result: Any,
) -> Kernel:
    """The :class:`Kernel` of one call.

    Args:
        args, kwargs, result: plain tensors, looked at for their shapes only.
        inputs, outputs: signatures of the tensors that go in and of the new ones that come out.
        written: signatures of the inputs that the call overwrites.
    """
    read = sum(map(nbytes, inputs))
    write = sum(map(nbytes, outputs)) + sum(map(nbytes, written))
    if name in _GATHERS:
        read = 2 * write
    elif name in _FILLS and inputs:
        read -= nbytes(inputs[0])
    return Kernel(
        name=name,
        kind=kind,
        dtype=str(_arithmetic(inputs, outputs)).removeprefix("torch."),
        flops=_flops(func, name, args, kwargs, inputs, result),
        bytes_read=max(read, 0),
        bytes_written=write,
        shapes=tuple(tuple(shape) for shape, _, _ in inputs[:4]),
        tensors=len(inputs) + len(outputs),
    )


def nbytes(signature: Signature) -> int:
    """Bytes of a tensor with this signature, each element once."""
    shape, _, dtype = signature
    return math.prod(shape) * dtype.itemsize


def _arithmetic(inputs: Sequence[Signature], outputs: Sequence[Signature]) -> torch.dtype:
    for _, _, dtype in (*inputs, *outputs):
        if dtype.is_floating_point or dtype.is_complex:
            return dtype
    return inputs[0][2] if inputs else outputs[0][2] if outputs else torch.float32


def _flops(
    func: OpOverload,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[Signature],
    result: Any,
) -> int:
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return _attention_flops(name, inputs)
    if name.startswith("mkldnn_rnn_layer"):
        return _rnn_flops(name, inputs)
    return 0


def _attention_flops(name: str, inputs: Sequence[Signature]) -> int:
    """Two products of (queries x keys x width), five in backward, as the flop counter has them."""
    query, key = (inputs[1], inputs[2]) if "backward" in name else (inputs[0], inputs[1])
    (batch, heads, queries, width), keys = query[0], key[0][2]
    products = 5 if "backward" in name else 2
    return products * 2 * batch * heads * queries * keys * width


def _rnn_flops(name: str, inputs: Sequence[Signature]) -> int:
    """Each time step and sequence multiplies with every weight; backward does it twice over."""
    steps, batch = inputs[0][0][:2]
    weights = sum(math.prod(shape) for shape, _, _ in inputs[1:3])
    return 2 * steps * batch * weights * (2 if "backward" in name else 1)
