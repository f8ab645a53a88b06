"""What the tests of virtual GPUs share: having some, and finding no memory in use after."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from labutils import virtual
from labutils.virtual.record import Entry
from labutils.virtual.state import state


@contextlib.contextmanager
def gpus(count: int = 4, **options: Any) -> Iterator[Any]:
    """``count`` virtual GPUs; gives ``torch.vgpu``.  At the end no byte may be allocated."""
    virtual.enable(count, **options)
    module: Any = torch.get_device_module("vgpu")
    for index in range(count):
        module.reset_peak_memory_stats(index)
    try:
        yield module
    finally:
        if state.devices:
            module.set_device(0)
        if any(state.ledger.allocated):
            gc.collect()
        left = list(state.ledger.allocated)
        virtual.disable()
    assert not any(left), f"bytes left on the devices: {left}"


@contextlib.contextmanager
def recorded() -> Iterator[list[Entry]]:
    """The entries that the block adds to the log."""
    entries: list[Entry] = []
    mark = state.recorder.count
    yield entries
    found, lost = state.recorder.since(mark)
    assert not lost
    entries.extend(found)


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of the elements of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)


def to(value: Any, device: str) -> Any:
    """``value`` with all tensors in it on ``device``, needing gradients where they did."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, list | tuple):
        return type(value)(to(v, device) for v in value)
    return value
