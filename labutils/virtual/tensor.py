"""The tensor of a virtual GPU.

A :class:`VirtualTensor` wraps a plain tensor: a CPU tensor that holds the values, or a meta tensor
when compute is phantom.  To PyTorch's C++ it is a CPU tensor, so autograd and DDP need no device of
their own; to Python it is on ``vgpu:i``.  What happens when an operation meets one is in
``labutils.virtual.dispatch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labutils.virtual.memory import Block
from labutils.virtual.state import state

Signature = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and element type of a tensor."""

CPU = torch.device("cpu")
META = torch.device("meta")
_make_wrapper: Any = torch.Tensor._make_wrapper_subclass


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU.  Made by ``.to("vgpu:0")``, ``torch.zeros(device="vgpu")``, …"""

    raw: torch.Tensor
    """The plain tensor with the values (CPU) or only the shape (meta)."""
    index: int  # type: ignore[assignment]
    """Number of the device."""
    block: Block
    """The storage, as the ledger counts it; shared by views."""
    signature: Signature

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["raw"], self.index

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], index: int, size: Any, stride: Any
    ) -> VirtualTensor:
        return wrap(inner["raw"], index)


def wrap(raw: torch.Tensor, index: int, block: Block | None = None) -> VirtualTensor:
    """Put the plain tensor ``raw`` on device ``index``, on ``block`` or on memory of its own.

    Raises:
        torch.OutOfMemoryError: the device has not that much left.
    """
    try:
        shape, stride, dtype = raw.shape, raw.stride(), raw.dtype
        nbytes = raw.untyped_storage().nbytes() if block is None else 0
    except RuntimeError:
        if raw.is_nested:
            raise nested() from None
        raise RuntimeError(
            f"Virtual GPUs hold dense tensors only, not {raw.layout}: use .to_dense(), "
            "or sparse=False in nn.Embedding."
        ) from None
    if block is None:
        block = Block(state.ledger, index, nbytes)
    made: VirtualTensor = _make_wrapper(
        VirtualTensor,
        shape,
        strides=stride,
        storage_offset=raw.storage_offset(),
        dtype=dtype,
        device=CPU,
    )
    made.raw = raw
    made.index = index
    made.block = block
    made.signature = (shape, stride, dtype)
    return made


def nested() -> RuntimeError:
    """The error for a nested tensor."""
    return RuntimeError(
        "Virtual GPUs hold dense tensors only, no nested ones: keep the nested tensor on the CPU, "
        "or pad it with torch.nested.to_padded_tensor(tensor, 0.0) and move that."
    )


def adopt(tensor: Any, source: VirtualTensor) -> None:
    """Make ``tensor`` be what ``source`` is, as ``tensor.data = source`` does."""
    _set_data(tensor, source)
    tensor.raw = source.raw
    tensor.index = source.index
    tensor.block = source.block
    tensor.signature = source.signature


_data: Any = torch.Tensor.data
_set_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__
