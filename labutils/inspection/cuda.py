"""Letting virtual GPUs stand in for CUDA, for scripts that insist on it, where there is none.

While :func:`standing_in` is entered, ``"cuda"`` means this rank's virtual GPUs: for tensors and
modules (a function mode exchanges the device), for ``torch.cuda``, autocast, ``torch.load`` and
pinned memory.  Tensors then say that they are on "vgpu".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from labutils.inspection.facts import wrap


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Have "cuda" mean "vgpu" in this process, from now on (it is not undone)."""
    vgpu = torch.get_device_module("vgpu")
    for name in vgpu.__all__:
        value = getattr(vgpu, name)
        replaced = callable(value) and not isinstance(value, type)
        setattr(torch.cuda, name, _translated(value) if replaced else value)
    for name, answer in {
        "is_initialized": True, "is_bf16_supported": True, "is_current_stream_capturing": False,
        "init": None, "manual_seed": None, "manual_seed_all": None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    wrap(torch.autocast, "__init__", _first_translated)
    wrap(torch.amp.GradScaler, "__init__", _first_translated)
    wrap(torch, "load", _with_location)
    wrap(DataLoader, "__init__", _unpinned)
    with _Exchange():
        yield


def _device(value: Any) -> Any:
    """``value`` with "vgpu" in the place of "cuda", if it is a device."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("vgpu", _index(value.index))
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return _device(torch.device(value))
    return value


def _index(index: int | None) -> int:
    return torch.cuda.current_device() if index is None else index


class _Exchange(TorchFunctionMode):
    """Sends every torch function that is asked for "cuda" to the virtual GPUs."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func is torch.device:  # a name only
            return func(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cuda:
            wanted = args[1] if len(args) > 1 else kwargs.get("device")
            return args[0].to(_device(torch.device("cuda", wanted) if isinstance(wanted, int)
                                      else wanted or "cuda"))  # fmt: skip
        return func(*map(_device, args), **{k: _device(v) for k, v in kwargs.items()})


def _translated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_device, args), **{k: _device(v) for k, v in kwargs.items()})

    return translated


def _first_translated(
    original: Callable[..., Any], made: Any, device: Any = "cuda", *args: Any, **more: Any
) -> None:  # fmt: skip
    more = {name: value for name, value in more.items() if name != "device_type"} | (
        {} if "device_type" not in more else {"device_type": _type(more["device_type"])}
    )
    if "device_type" in more:
        original(made, *args, **more)
    else:
        original(made, _type(device), *args, **more)


def _type(device: Any) -> str:
    return "vgpu" if str(device).startswith("cuda") else device


def _with_location(
    original: Callable[..., Any], file: Any, map_location: Any = None, *args: Any, **more: Any
) -> Any:  # fmt: skip
    if isinstance(map_location, dict):
        map_location = {_text(a): _text(b) for a, b in map_location.items()}
    return original(file, _device(map_location), *args, **more)


def _text(location: Any) -> Any:
    return location.replace("cuda", "vgpu") if isinstance(location, str) else _device(location)


def _unpinned(original: Callable[..., Any], loader: Any, *args: Any, **more: Any) -> None:
    original(loader, *args, **{**more, "pin_memory": False})
