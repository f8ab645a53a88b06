"""``torch.save`` and ``torch.load`` of virtual tensors, in the file format of any other device.

A checkpoint looks like one from CUDA with "vgpu:0" in the place of "cuda:0": it can be loaded where
there are no virtual GPUs with ``map_location="cpu"``, and one from elsewhere with
``map_location="vgpu:0"``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch.serialization import register_package
from torch.storage import TypedStorage

from labutils.virtual import errors
from labutils.virtual.memory import Block
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor

_BEFORE_CPU = 5
"""Priority among the packages that may claim a storage; the CPU's is 10."""


class VirtualStorage(torch.UntypedStorage):
    """A storage just read from a file, on its way to a virtual GPU."""

    _vgpu_index = 0
    _vgpu_block: weakref.ref[Block] | None = None
    """The ledger's block, shared by all tensors that are built on this storage."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("vgpu", self._vgpu_index)


def _reduce(self: VirtualTensor, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
    if state.ledger.closed:
        raise RuntimeError(state.ledger.closed)
    if self.raw.is_meta:
        raise errors.no_values("torch.save")
    if isinstance(self, torch.nn.Parameter):
        return torch._utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())
    storage = self.raw.untyped_storage()
    storage._vgpu_index = self.index  # type: ignore[attr-defined]
    typed = TypedStorage(wrap_storage=storage, dtype=self.dtype, _internal=True)
    raw = self.raw
    where = (typed, raw.storage_offset(), tuple(raw.shape), raw.stride())
    return torch._utils._rebuild_tensor_v2, (*where, self.requires_grad, OrderedDict())


def _tag(storage: Any) -> str | None:
    index = getattr(storage, "_vgpu_index", None)
    return None if index is None else f"vgpu:{index}"


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("vgpu"):
        return None
    index = torch.device(location).index or 0
    if index >= state.devices:
        raise RuntimeError(
            f"Attempting to deserialize object on vgpu:{index} but there are {state.devices} "
            "virtual GPUs. Use torch.load with map_location to map your storages to an existing "
            "device, for example map_location='cpu'."
        )
    restored = VirtualStorage(storage.nbytes())
    restored.copy_(storage)
    restored._vgpu_index = index
    return restored


def install() -> None:
    """Teach ``torch.save`` and ``torch.load`` about virtual tensors."""
    VirtualTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]
    register_package(_BEFORE_CPU, _tag, _restore)
