"""Operators of which PyTorch's C++ makes more than one, and for which it looks at the device.

To C++ a virtual tensor is on the CPU.  Tensors that a C++ function makes "where its argument is"
are therefore plain CPU tensors; inside the functions listed here they become virtual ones.  (What
the C++ of a backward makes is taken in by ``labutils.virtual.dispatch``.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labutils.virtual.dispatch import run
from labutils.virtual.operators import HANDLERS, operator_of
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor, wrap

aten = torch.ops.aten

FUNCTIONS = (
    (torch, "combinations istft matrix_rank nanquantile quantile stft"),
    (torch.linalg, "matrix_rank"),
    (torch.nn.functional, "one_hot scaled_dot_product_attention"),
    (torch.Tensor, "istft nanquantile quantile stft"),
    (torch._VF, "lstm"),  # without biases it makes zeros
)
"""Functions that make tensors in C++."""

WITH_OUT = (
    (torch, "det inverse slogdet"),
    (torch.linalg, "cholesky det eigvalsh inv ldl_factor lu_factor slogdet svdvals"),
)
"""Functions that make tensors in C++ when they are given ``out=``."""

_NAMES = (
    "arange empty empty_strided eye full linspace logspace ones scalar_tensor zeros "
    "tril_indices triu_indices"
)
_FACTORIES = {getattr(aten, name) for name in _NAMES.split()}


class OnDevice(TorchDispatchMode):
    """Tensors that C++ makes "on the device of its argument" become virtual, on ``index``.

    Args:
        floating_only: leave integer tensors where they are (DDP's reducer keeps some on the CPU).
    """

    def __init__(self, index: int, *, floating_only: bool = False) -> None:
        super().__init__()
        self.index = index
        self.floating_only = floating_only

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _FACTORIES or type(result) is not torch.Tensor:
            return result
        if self.floating_only and not result.is_floating_point():
            return result
        return wrap(result.to("meta") if state.phantom else result, self.index)


def on_device(original: Callable[..., Any], *, with_out: bool = False) -> Callable[..., Any]:
    """``original``, with what its C++ makes on the device of its first argument.

    Args:
        with_out: only in calls with ``out=``.
    """

    @functools.wraps(original, updated=())
    def function(input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not VirtualTensor or (with_out and kwargs.get("out") is None):
            return original(input, *args, **kwargs)
        with OnDevice(input.index):
            return original(input, *args, **kwargs)

    return function


def ctc_loss(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.ctc_loss`` whose lengths, if they are numbers or on the CPU, go to the device."""

    @functools.wraps(original)
    def function(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if type(log_probs) is VirtualTensor:
            lengths = [torch.as_tensor(n, device=log_probs.device) for n in args[:2]]
            targets, args = targets.to(log_probs.device), (*lengths, *args[2:])
        return original(log_probs, targets, *args, **kwargs)

    return function


def _physical(operator: Any) -> Callable[..., Any]:
    """Conjugate and negate at once: lazily, the wrapped tensor would carry a mark that C++ looks
    for on the virtual one."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(operator_of(operator), args, kwargs)

    return handler


HANDLERS[aten._conj] = _physical(aten.conj_physical.default)
HANDLERS[aten._neg_view] = _physical(aten.neg.default)


def _lazily_conjugating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose C++ conjugates lazily, which PyTorch switches off in a dispatch."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        keys = keys.remove(key)
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, keys):
        return run(operator_of(func), args, kwargs)


HANDLERS[aten.linalg_pinv] = HANDLERS[aten.linalg_lstsq] = _lazily_conjugating


def _packed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Packing sequences: the batch sizes stay on the CPU, where cuDNN wants them too."""
    data, sizes = run(operator_of(func), args, kwargs)
    return data, sizes.raw if type(sizes) is VirtualTensor else sizes


HANDLERS[aten._pack_padded_sequence] = _packed


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mostly autograd's own, which keeps results detached: no operation that a GPU would see."""
    tensor = args[0]
    return wrap(tensor.raw, tensor.index, tensor.block)


HANDLERS[aten.detach] = _detach
