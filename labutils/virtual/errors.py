"""The errors of virtual GPUs, in the words that CUDA uses where CUDA has them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor


def check_index(index: int) -> int:
    """``index`` itself, if there is such a virtual GPU.

    Raises:
        RuntimeError: there is none (CUDA says "invalid device ordinal").
    """
    if index >= state.devices:
        raise RuntimeError(
            f"vgpu error: invalid device ordinal. vgpu:{index} does not exist: {state.known()}."
        )
    return index


def explain(
    error: RuntimeError, name: str, inputs: Sequence[VirtualTensor], index: int
) -> Exception:
    """Say in the words of a GPU what the CPU or meta implementation complained about."""
    text = str(error)
    if "DefaultCPUAllocator" in text:
        asked = re.search(r"allocate (\d+) bytes", text)
        try:
            state.ledger.check(index, int(asked.group(1)) if asked else 0)
        except torch.OutOfMemoryError as too_much:
            return too_much
        return torch.OutOfMemoryError(
            f"The host's memory cannot hold the values of {name} on a virtual GPU ({text.strip()})."
            ' Use lab.virtual.enable(..., compute="phantom") for sizes like this.'
        )
    if any(t.raw.is_meta for t in inputs):
        if any(not t.raw.is_meta for t in inputs):
            return RuntimeError(
                f"{name} got tensors made with compute='real' and with compute='phantom'; "
                "make the model and the data again after lab.virtual.enable(...)."
            )
        if isinstance(error, NotImplementedError) or "meta" in text.lower():
            return no_values(name)
    return error


WITH_VALUES = "Use lab.virtual.enable(..., compute='real') to get values."
"""The way out where a value was read, for a program that has chosen its virtual GPUs itself."""


def no_values(name: str) -> RuntimeError:
    """The error for reading a value that phantom compute never made."""
    return RuntimeError(
        f"{name} needs values, and this virtual GPU computes none (compute='phantom': shapes, "
        f"memory and time only). {WITH_VALUES}"
    )


def mixed_devices(name: str, inputs: Sequence[VirtualTensor], cpu: Sequence[torch.Tensor]) -> str:
    """CUDA's sentence for tensors on different devices."""
    devices = list(
        dict.fromkeys([f"vgpu:{t.index}" for t in inputs] + [str(t.device) for t in cpu])
    )
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{devices[0]} and {devices[-1]}! (when checking the arguments of {name}). "
        f"Move them to one device first, for example with .to('{devices[0]}')."
    )
