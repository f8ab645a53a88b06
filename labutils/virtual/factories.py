"""Functions that make tensors, and generators, taught about ``device="vgpu"``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from labutils.virtual import streams
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor


def install() -> None:
    """Replace PyTorch's factories and its ``Generator``."""
    _replace_factories()
    _replace_generator()


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Put ``replacement`` in the place of ``owner.name``, also for TorchScript's compiler."""
    operator = _builtins._find_builtin(getattr(owner, name))
    if operator is not None:
        _builtins._register_builtin(replacement, operator)
    setattr(owner, name, replacement)


def is_virtual(device: Any) -> bool:
    """Whether ``device`` (a string, a ``torch.device`` or anything else) means a virtual GPU."""
    if isinstance(device, str):
        return device.startswith("vgpu")
    return isinstance(device, torch.device) and device.type == "vgpu"


def _default_device() -> torch.device | None:
    """What ``with torch.device(...)`` or ``torch.set_default_device`` says, if anything.

    (``torch.get_default_device`` makes a tensor to find out, which would ask here again.)
    """
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def _numbers(data: Any) -> Any:
    """``data`` with the values of the virtual tensors in it: ``torch.tensor([loss, loss])``."""
    if isinstance(data, list | tuple):
        return type(data)(map(_numbers, data)) if type(data) in (list, tuple) else data
    return data.tolist() if type(data) is VirtualTensor else data


def _replace_factories() -> None:
    """``torch.tensor`` and its like build on the CPU, then move (C++ cannot build on vgpu:1)."""

    def build_then_move(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
            if args and isinstance(args[0], list | tuple):
                args = (_numbers(args[0]), *args[1:])
            device = kwargs.get("device")
            if device is None and args and type(args[0]) is VirtualTensor:
                device = args[0].device
            if device is None and state.devices:
                device = _default_device()
            if not is_virtual(device):
                return original(*args, **kwargs)
            requires_grad = kwargs.pop("requires_grad", False)
            if args and type(args[0]) is VirtualTensor:
                if original is _as_tensor:
                    return args[0].to(device, kwargs.get("dtype"))
                made = args[0].detach() if original is not _tensor else args[0].detach().clone()
                return made.to(device, kwargs.get("dtype")).requires_grad_(requires_grad)
            kwargs["device"] = "cpu"
            return original(*args, **kwargs).to(device).requires_grad_(requires_grad)

        return factory

    def like(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def factory(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if type(input) is VirtualTensor and device is not None and not is_virtual(device):
                input = torch.empty_strided(
                    input.shape, input.stride(), dtype=input.dtype, device=device
                )
            return original(input, *args, **kwargs)

        return factory

    _tensor, _as_tensor = torch.tensor, torch.as_tensor
    for name in ("tensor", "as_tensor", "asarray"):
        replace(torch, name, build_then_move(getattr(torch, name)))
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint"):
        replace(torch, f"{name}_like", like(getattr(torch, f"{name}_like")))


def _replace_generator() -> None:
    """``torch.Generator("vgpu")``: one that remembers its device, as all share the CPU's kind."""
    plain: Any = torch.Generator

    class Meta(type(plain)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain)

    class Generator(plain, metaclass=Meta):
        def __new__(cls, device: Any = "cpu") -> Any:
            made = plain.__new__(cls, "cpu" if is_virtual(device) else device)
            if is_virtual(device):
                made.index = streams.index_of(device)
            return made

        @property
        def device(self) -> torch.device:
            index = getattr(self, "index", None)
            return plain.device.__get__(self) if index is None else torch.device("vgpu", index)

    torch.Generator = Generator  # type: ignore[misc]
