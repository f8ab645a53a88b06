"""Registration of "vgpu" with PyTorch: the one module that replaces parts of PyTorch.

Each replacement passes everything that has nothing to do with virtual GPUs on to the original.
They are made once per process, by :func:`register`; a test covers each of them.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import _functions, comm
from torch.nn.utils import clip_grad
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration

from labutils.virtual import (
    autocast,
    checkpoint,
    composite,
    copies,
    dispatch,
    distributed,
    factories,
    gradients,
    limits,
    methods,
    module,
    streams,
    syncbn,
)
from labutils.virtual import comm as virtual_comm
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor

_registered = False
_library: torch.library.Library | None = None


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return state.devices > 0

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def register() -> None:
    """Make "vgpu" a device of PyTorch, and ``torch.vgpu`` its module (once per process)."""
    global _registered, _library
    if _registered:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend_registration._setup_privateuseone_for_python_backend("vgpu", module, _Hooks())
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_fallback, "PrivateUse1")
    methods.install(VirtualTensor)
    factories.install()
    _replace_tensor_methods()
    gradients.install()
    _replace_accelerator()
    _replace_data_parallel()
    _replace_dropout()
    _replace_composites()
    _explain_moves()
    _mark_optimizer_steps()
    _group_by_device()
    autocast.install()
    checkpoint.install()
    distributed.install()
    limits.install()
    syncbn.install()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
    _registered = True


def _after_fork() -> None:
    """A child of a process with virtual GPUs may not use them, as with CUDA."""
    if state.devices:
        state.ledger.closed = (
            "Cannot use virtual GPUs in a forked subprocess, such as a DataLoader's worker. Return "
            "CPU tensors there, and move the batch to the GPU in the training loop."
        )


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch.dispatch(func, args, kwargs)


def _replace_tensor_methods() -> None:
    """Methods of plain tensors that must know of virtual ones."""
    plain: Any = torch.Tensor
    to, pin_memory, is_pinned, data = plain.to, plain.pin_memory, plain.is_pinned, plain.data
    type_as = plain.type_as

    @functools.wraps(to)
    def move_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and type(args[0]) is VirtualTensor:
            args = (args[0].device, args[0].dtype, *args[1:])
        device = args[0] if args else kwargs.get("device")
        if not factories.is_virtual(device):
            return to(self, *args, **kwargs)
        return methods.to_virtual(self, *args, **kwargs)

    @functools.wraps(type_as)
    def become(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        virtual = VirtualTensor in (type(self), type(other))
        return self.to(other.device, other.dtype) if virtual else type_as(self, other)

    @functools.wraps(pin_memory)
    def pin(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return copies.pin(self) if state.devices else pin_memory(self, *args, **kwargs)

    @functools.wraps(is_pinned)
    def pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return copies.is_pinned(self) if state.devices else is_pinned(self, *args, **kwargs)

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if type(value) is VirtualTensor and type(self) is not VirtualTensor:
            methods.swap_data(self, value)
        else:
            data.__set__(self, value)

    plain.to = move_to
    plain.type_as = become
    plain.pin_memory = pin
    plain.is_pinned = pinned
    plain.data = property(data.__get__, set_data)
    plain.vgpu = methods.vgpu


def _replace_accelerator() -> None:
    """``torch.accelerator``: what is asked of the current device, asked of the virtual ones."""
    accelerator = torch.accelerator
    replacements: dict[str, Callable[..., Any]] = {
        "device_count": lambda: state.devices,
        "current_device_index": streams.current_device,
        "set_device_index": streams.set_device,
        "set_device_idx": streams.set_device,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "synchronize": streams.synchronize,
        "device_index": streams.on_device,
        "empty_cache": module.empty_cache,
        "memory_stats": module.memory_stats,
        "memory_allocated": module.memory_allocated,
        "max_memory_allocated": module.max_memory_allocated,
        "memory_reserved": module.memory_reserved,
        "max_memory_reserved": module.max_memory_reserved,
        "reset_peak_memory_stats": module.reset_peak_memory_stats,
        "get_memory_info": module.mem_get_info,
    }
    for name, replacement in replacements.items():
        original = getattr(accelerator, name)
        setattr(accelerator, name, _when_enabled(replacement, original))


def _when_enabled(virtual: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (virtual if state.devices else original)(*args, **kwargs)

    return choose


def _replace_data_parallel() -> None:
    """The functions below ``nn.DataParallel``; everything above them is PyTorch's own."""
    replaced = ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced")
    for name in (*replaced, "scatter", "gather"):
        original, virtual = getattr(comm, name), getattr(virtual_comm, name)
        setattr(comm, name, _when_enabled(virtual, original))
    copy_streams: dict[int, streams.Stream] = {}

    def copy_stream(device: torch.device) -> torch.Stream | None:
        if device.type != "vgpu":
            return get_stream(device)
        index = streams.index_of(device)
        if index not in copy_streams:
            copy_streams[index] = streams.Stream(index)
        return copy_streams[index]

    get_stream = _functions._get_stream
    _functions._get_stream = copy_stream
    original_type = torch._utils._get_available_device_type

    def device_type() -> str | None:
        return "vgpu" if state.devices else original_type()

    torch._utils._get_available_device_type = device_type
    _replace_parallel_apply()
    for name in ("data_parallel", "distributed"):
        user = importlib.import_module(f"torch.nn.parallel.{name}")
        if hasattr(user, "_get_available_device_type"):
            user._get_available_device_type = device_type  # type: ignore[attr-defined]


def _replace_parallel_apply() -> None:
    """Its threads compute on the CPU at the same time, so they share the CPU's cores."""
    # The package has a function of the module's name, so the module is found by that name only.
    module = importlib.import_module("torch.nn.parallel.parallel_apply")
    # It asks torch.cuda for the index of a device, and would refuse vgpu:0.
    module._get_device_index = torch._utils._get_device_index  # type: ignore[attr-defined]
    original = module.parallel_apply

    @functools.wraps(original)
    def parallel_apply(modules: Any, *args: Any, **kwargs: Any) -> Any:
        threads = torch.get_num_threads()
        if not state.devices or len(modules) < 2:
            return original(modules, *args, **kwargs)
        torch.set_num_threads(max(1, threads // len(modules)))
        try:
            return original(modules, *args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    for user in ("", ".parallel_apply", ".data_parallel"):
        importlib.import_module(f"torch.nn.parallel{user}").parallel_apply = parallel_apply  # type: ignore[attr-defined]


def _replace_dropout() -> None:
    """Dropout as GPUs do it: one fused kernel with a mask of one byte an element."""

    def fused(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
            if type(input) is VirtualTensor and train and 0 < p < 1:
                return torch.native_dropout(input, p, True)[0]
            return original(input, p, train)

        return dropout

    factories.replace(torch, "dropout", fused(torch.dropout))
    torch._VF.dropout = torch.dropout


def _replace_composites() -> None:
    """Functions whose C++ makes tensors where their argument is."""
    for table, with_out in ((composite.FUNCTIONS, False), (composite.WITH_OUT, True)):
        for owner, names in table:
            for name in names.split():
                if hasattr(owner, name):
                    original = getattr(owner, name)
                    replacement = composite.on_device(original, with_out=with_out)
                    factories.replace(owner, name, replacement)
    factories.replace(torch, "ctc_loss", composite.ctc_loss(torch.ctc_loss))


def _mark_optimizer_steps() -> None:
    """Operations inside ``optimizer.step()`` belong to the optimizer's phase."""

    def begin(*_: Any) -> None:
        state.recorder.host().phase = "optimizer"

    def end(*_: Any) -> None:
        state.recorder.host().phase = ""

    optimizer.register_optimizer_step_pre_hook(begin)
    optimizer.register_optimizer_step_post_hook(end)


def _group_by_device() -> None:
    """Optimizers and gradient clipping work on lists of tensors, grouped by their device."""
    optimizer._foreach_supported_types.append(VirtualTensor)
    original = _foreach_utils._group_tensors_by_device_and_dtype

    @functools.wraps(original)
    def group(lists: Any, with_indices: bool = False) -> Any:
        if not any(type(t) is VirtualTensor for t in lists[0]):
            return original(lists, with_indices)
        groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
        for number, tensors in enumerate(
            zip(*(column or [None] * len(lists[0]) for column in lists), strict=True)
        ):
            key = (tensors[0].device, tensors[0].dtype)
            columns, indices = groups.setdefault(key, ([[] for _ in lists], []))
            for column, source, tensor in zip(columns, lists, tensors, strict=True):
                if source:
                    column.append(tensor)
            if with_indices:
                indices.append(number)
        return groups

    for user in (_foreach_utils, optimizer, clip_grad):
        user._group_tensors_by_device_and_dtype = group  # type: ignore[attr-defined]


def _explain_moves() -> None:
    """A module's parameters change places with virtual ones, unless something still holds them."""
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            name = str(error).rpartition("swap ")[2]
            raise RuntimeError(
                f"{name} cannot move to another device while something holds on to it, such as a "
                "loss that was computed from it or a weak reference. Move the model before it is "
                "used, or delete that (del loss) first."
            ) from error

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
