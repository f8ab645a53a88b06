"""Copies: between virtual GPUs, from and to the host, and the reading of values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from labutils.virtual import errors, journal, unknown
from labutils.virtual.dispatch import run
from labutils.virtual.operators import HANDLERS, operator_of
from labutils.virtual.record import Copy, Kernel
from labutils.virtual.state import state
from labutils.virtual.streams import current_device, current_stream_id
from labutils.virtual.tensor import VirtualTensor, adopt, wrap

aten = torch.ops.aten
HOST = -1


def copy_kernel(name: str, nbytes: int, dtype: torch.dtype) -> Kernel:
    """The :class:`Kernel` of moving ``nbytes`` bytes."""
    return Kernel(name, "copy", str(dtype).removeprefix("torch."), 0, nbytes, nbytes)


def record_copy(
    tensor: Any,
    target: int,
    *,
    pinned: bool,
    blocking: bool,
    made: Sequence[VirtualTensor] = (),
) -> None:
    """Write the copy of ``tensor`` to device ``target`` to the log."""
    virtual = isinstance(tensor, VirtualTensor)
    source = tensor.index if virtual else HOST
    name = "h2d" if source == HOST else "d2h" if target == HOST else "p2p"
    kernel = copy_kernel(name, tensor.numel() * tensor.dtype.itemsize, tensor.dtype)
    stream = current_stream_id(source) if name == "p2p" else 0
    ref = Copy(source, target, pinned, blocking, stream)
    inputs = (tensor,) if virtual else ()
    device = source if target == HOST else target
    issuer = source if virtual else target
    journal.record(device, kernel, inputs, made, "copy", ref, issuer=issuer)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the plain CPU ``tensor`` lies in memory that ``pin_memory`` has locked."""
    return bool(getattr(tensor.untyped_storage(), "_vgpu_pinned", False))


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the plain CPU ``tensor`` in page-locked memory, as far as virtual GPUs care."""
    if is_pinned(tensor):
        return tensor
    pacer = state.recorder.pacer
    with pacer.busy("pin") if pacer else nullcontext():
        pinned = tensor.clone()
    return _mark_pinned(pinned)


def _mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage()._vgpu_pinned = True  # type: ignore[attr-defined]
    return tensor


def move(
    tensor: Any, target: torch.device | None, *, non_blocking: bool = False, **options: Any
) -> torch.Tensor:
    """``tensor`` on ``target`` (its own device if None), always as a copy.

    Args:
        options: ``dtype`` and ``memory_format``, as ``Tensor.to`` takes them.
    """
    virtual = type(tensor) is VirtualTensor
    source = tensor.index if virtual else HOST
    destination = _destination(tensor, target)
    if source == destination:
        operator = operator_of(aten._to_copy.default)
        return run(operator, (tensor,), options)
    raw = tensor.raw if virtual else _physical(tensor)
    if destination == HOST:
        return _to_host(tensor, non_blocking, options)
    if state.phantom:
        options["device"] = "meta"
    try:
        out = wrap(aten._to_copy(raw, **options), destination)
    except RuntimeError as error:
        raise errors.explain(error, "copy", [tensor] if virtual else [], destination) from None
    pinned = virtual or is_pinned(raw)
    blocking = not virtual and not (pinned and non_blocking)
    record_copy(tensor, destination, pinned=pinned, blocking=blocking, made=(out,))
    return out


def _to_host(tensor: VirtualTensor, non_blocking: bool, options: dict[str, Any]) -> torch.Tensor:
    """A copy on the CPU; one that the host does not wait for is in pinned memory, as with CUDA."""
    raw = tensor.raw
    if raw.is_meta:
        unknown.check("Copying to the CPU")
        out = torch.zeros_like(raw, device="cpu", **options)
    else:
        out = aten._to_copy(raw, **options)
    record_copy(tensor, HOST, pinned=non_blocking, blocking=not non_blocking)
    if raw.is_meta:
        unknown.land(out, tensor.index, later=non_blocking)
    return _mark_pinned(out) if non_blocking else out


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """The plain ``tensor`` without marks that it is to be conjugated or negated when read."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_complex() or tensor.is_neg() else tensor


class _Move(torch.autograd.Function):
    """A differentiable :func:`move`: the gradient comes back to where the tensor was."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, target: torch.device, options: Any) -> torch.Tensor:
        ctx.device, ctx.dtype = tensor.device, tensor.dtype
        return move(tensor, target, **options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.device, ctx.dtype), None, None


def to(tensor: torch.Tensor, target: torch.device, **options: Any) -> torch.Tensor:
    """``tensor`` on another device, differentiably where that is asked for."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Move.apply(tensor, target, options)
    return move(tensor, target, **options)


def _destination(tensor: torch.Tensor, target: torch.device | None) -> int:
    if target is None:
        return tensor.index if type(tensor) is VirtualTensor else HOST
    if target.type != "vgpu":
        return HOST
    return current_device() if target.index is None else errors.check_index(target.index)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
    device = kwargs.get("device")
    target = None if device is None else torch.device(device)
    virtual = type(args[0]) is VirtualTensor
    if target is not None and target.type == "meta":
        raw = args[0].raw if virtual else args[0]
        return torch.empty_like(raw, device="meta", dtype=kwargs.get("dtype"))
    if virtual and target is not None and target.type == "cpu":
        target = None  # C++, to which every virtual tensor is on the CPU, means "where it is"
    return move(args[0], target, non_blocking=bool(kwargs.get("non_blocking")), **options)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    target, source = args[:2]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    to = target.index if type(target) is VirtualTensor else HOST
    origin = source.index if type(source) is VirtualTensor else HOST
    raw_target = target.raw if to != HOST else target
    raw_source = source.raw if origin != HOST else source
    if to == origin:
        if not _same_memory(target, source):
            run(operator_of(func), (target, source), {})
        return target
    if to == HOST and raw_source.is_meta:
        unknown.check("Copying to the CPU")
    if raw_target.is_meta or raw_source.is_meta:
        torch.broadcast_shapes(raw_target.shape, raw_source.shape)
    else:
        raw_target.copy_(raw_source)
    between_gpus = HOST not in (to, origin)
    pinned = between_gpus or is_pinned(target if to == HOST else source)
    blocking = not between_gpus and not (pinned and non_blocking)
    made = () if to == HOST else (target,)
    record_copy(source, to, pinned=pinned, blocking=blocking, made=made)
    if to == HOST and raw_source.is_meta:
        unknown.land(target, origin, later=not blocking)
    return target


def _same_memory(target: VirtualTensor, source: VirtualTensor) -> bool:
    """Nothing to copy: CUDA leaves it out (Copy.cu), and DDP with gradients in its buckets."""
    return (
        target.block is source.block
        and target.signature == source.signature
        and target.storage_offset() == source.storage_offset()
    )


def _read_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.raw.is_meta:
        unknown.check("Reading a value (.item(), float(), bool(), if tensor: …)")
    record_copy(tensor, HOST, pinned=False, blocking=True)
    return unknown.value(tensor.dtype) if tensor.raw.is_meta else tensor.raw.item()


def _nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def _set_storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor.set_(storage, offset, size, stride)``, with which torch.load builds tensors."""
    tensor, source, *where = args
    if isinstance(source, VirtualTensor):
        adopt(tensor, wrap(source.raw, source.index, source.block))
        return tensor
    raw = torch.empty(0, dtype=tensor.dtype).set_(source, *where)
    if state.phantom:
        raw = raw.to("meta")
    known = getattr(source, "_vgpu_block", None)
    made = wrap(raw, tensor.index, known() if known else None)
    source._vgpu_block = weakref.ref(made.block)
    adopt(tensor, made)
    return tensor


def _refuse_pinning(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    raise RuntimeError(
        f"cannot pin 'torch.vgpu' tensor on vgpu:{args[0].index}: only dense CPU tensors can be "
        "pinned. Pin the batch before it goes to the GPU."
    )


HANDLERS.update(
    {
        aten._to_copy: _to_copy,
        aten.copy_: _copy_,
        aten._local_scalar_dense: _read_value,
        aten.record_stream: _nothing,
        aten.set_: _set_storage,
        aten._pin_memory: _refuse_pinning,
    }
)
