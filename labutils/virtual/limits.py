"""What virtual GPUs do not do, each said in a sentence: nested tensors, and compiled models."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from labutils.virtual import factories
from labutils.virtual.operators import HANDLERS
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor, nested

_NESTED = "as_nested_tensor narrow nested_tensor nested_tensor_from_jagged"


def install() -> None:
    """Replace the functions concerned."""
    for name in _NESTED.split():
        setattr(torch.nested, name, _dense_only(getattr(torch.nested, name)))
    torch.compile = _uncompiled(torch.compile)
    # Can one tensor take the other's data?  Module.to asks, under inference_mode here, about a
    # parameter on the CPU and its copy; where the answer is no, it makes a new parameter.
    HANDLERS[torch.ops.aten._has_compatible_shallow_copy_type] = lambda func, args, kwargs: all(
        isinstance(tensor, VirtualTensor) for tensor in args
    )


def _dense_only(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if any(type(leaf) is VirtualTensor or factories.is_virtual(leaf) for leaf in leaves):
            raise nested()
        return original(*args, **kwargs)

    return function


def _uncompiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``, of which nothing but the operations themselves is left on virtual GPUs."""

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        compiled = original(*args, **kwargs)
        if state.devices:
            warnings.warn(
                "torch.compile has no effect while there are virtual GPUs: they run and count the "
                "operations of the model one by one.",
                stacklevel=2,
            )
            run_eagerly(True)
        return compiled

    return compile


def run_eagerly(eager: bool) -> None:
    """Have all that was compiled, by anyone, run as it was written; or compiled again.

    So with the fast path of transformers in evaluation, which packs padded batches into nested
    tensors.
    """
    torch.backends.mha.set_fastpath_enabled(not eager)
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager" if eager else "default")
