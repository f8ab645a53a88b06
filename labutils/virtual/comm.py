"""Broadcast, scatter, gather and reduce between the virtual GPUs of one process.

These are the functions of ``torch.nn.parallel.comm`` that ``nn.DataParallel`` calls.  They group
tensors into buffers, copy and share memory as PyTorch's CUDA versions do
(torch/csrc/cuda/comm.cpp); broadcast and reduce are recorded as the NCCL collectives that they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _get_device_index, _reorder_tensors_as, _take_tensors

from labutils.virtual import journal
from labutils.virtual.copies import move
from labutils.virtual.record import Collective, Kernel
from labutils.virtual.state import state
from labutils.virtual.streams import stream as use_stream
from labutils.virtual.tensor import VirtualTensor, wrap

BUFFER_SIZE = 10 * 1024 * 1024
"""Bytes up to which small tensors travel together (PyTorch's default)."""


def _device(index: int) -> torch.device:
    return torch.device("vgpu", index) if index >= 0 else torch.device("cpu")


def _indices(devices: Sequence[Any]) -> list[int]:
    return [_get_device_index(d, True) for d in devices]


def _record(op: str, tensors: Sequence[VirtualTensor], root: int) -> None:
    """Log one collective over the devices of ``tensors``; each moves as many bytes as the first."""
    first = tensors[0]
    nbytes = first.numel() * first.element_size()
    kernel = Kernel(op, "communication", str(first.dtype)[6:], 0, nbytes, nbytes)
    devices = tuple(t.index for t in tensors)
    journal.record(root, kernel, tensors, tensors, "collective", Collective(op, devices, root=root))
    for tensor in tensors:
        journal.sample_memory(tensor.index)


def broadcast(tensor: torch.Tensor, devices: Sequence[Any], *, out: Any = None) -> Any:
    """Copies of ``tensor`` on ``devices`` (indices), the original where it already is."""
    (copies,) = zip(*broadcast_coalesced([tensor], devices), strict=True)
    return copies


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[Any], buffer_size: int = BUFFER_SIZE
) -> list[list[torch.Tensor]]:
    """Copies of all ``tensors`` (on one GPU) on each of ``devices``.

    Small tensors travel in flat buffers of up to ``buffer_size`` bytes; the copies are views of
    those buffers.  Where the tensors already are, they are returned themselves.

    Returns:
        One list per device, in the order of ``tensors``.
    """
    indices = _indices(devices)
    copies: dict[int, list[Any]] = {i: [None] * len(tensors) for i in indices}
    order = {id(t): n for n, t in enumerate(tensors)}
    with torch.no_grad():
        for chunk in _take_tensors(tensors, buffer_size):
            _broadcast_chunk(chunk, indices, copies, order)
    source = tensors[0].get_device() if tensors else -1
    return [list(map(_same, tensors)) if i == source else copies[i] for i in indices]


def _same(tensor: Any) -> VirtualTensor:
    """Another tensor on the same memory, with no history."""
    return wrap(tensor.raw, tensor.index, tensor.block)


def _broadcast_chunk(
    chunk: Sequence[Any], indices: list[int], copies: dict[int, list[Any]], order: dict[int, int]
) -> None:
    source = chunk[0].index
    targets = [i for i in indices if i != source]
    if not targets:
        return
    flat = _flatten(chunk)
    received = [wrap(torch.empty_like(flat.raw).copy_(flat.raw), i) for i in targets]
    _record("broadcast", [flat, *received], source)
    for index, buffer in zip(targets, received, strict=True):
        for tensor, view in zip(chunk, _unflatten(buffer, chunk), strict=True):
            copies[index][order[id(tensor)]] = view


def _flatten(tensors: Sequence[Any]) -> Any:
    """One tensor with the elements of all; the tensor itself if there is one.

    Views are made of the wrapped tensors: a model has hundreds, and C++ takes no time for them.
    """
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([wrap(t.raw.reshape(-1), t.index, t.block) for t in tensors])


def _unflatten(buffer: VirtualTensor, like: Sequence[Any]) -> list[VirtualTensor]:
    """Views of ``buffer`` with the shapes of ``like``, one after the other."""
    if len(like) == 1:
        return [_same(buffer)]
    parts = buffer.raw.split([t.numel() for t in like])
    return [
        wrap(part.view(t.shape), buffer.index, buffer.block)
        for part, t in zip(parts, like, strict=True)
    ]


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Any]], destination: Any = None, buffer_size: int = BUFFER_SIZE
) -> tuple[torch.Tensor, ...]:
    """Sums over GPUs: ``inputs`` has one list per GPU, of as many tensors of equal shapes.

    Small tensors are added in flat buffers of up to ``buffer_size`` bytes.
    """
    sums: list[torch.Tensor] = []
    inputs = [_on_device(tensors, destination) for tensors in inputs]
    with torch.no_grad():
        for chunks in zip(*(_take_tensors(tensors, buffer_size) for tensors in inputs)):
            total: Any = reduce_add([_flatten(chunk) for chunk in chunks], destination)
            sums += _unflatten(total, chunks[0])
    return tuple(_reorder_tensors_as(sums, inputs[0]))


def _on_device(tensors: Sequence[Any], destination: Any) -> list[VirtualTensor]:
    """``tensors`` with those that autograd made for unused outputs, zeros on the CPU, moved."""
    virtual = next((t for t in tensors if type(t) is VirtualTensor), None)
    index = _get_device_index(destination, True) if virtual is None else virtual.index
    place = "meta" if state.phantom else "cpu"
    return [
        t if type(t) is VirtualTensor else wrap(torch.zeros_like(t, device=place), index)
        for t in tensors
    ]


def reduce_add(inputs: Sequence[Any], destination: Any = None) -> torch.Tensor:
    """The sum of ``inputs`` (one per GPU, equal shapes), in their order, on ``destination``."""
    index = _get_device_index(destination, True)
    roots = [t for t in inputs if t.get_device() == index]
    if not roots:
        raise RuntimeError(
            "reduce_add expects destination to be on the same GPU with one of the tensors"
        )
    if len(inputs) == 1:
        return inputs[0]
    raws = [t.raw for t in inputs]
    total = raws[0] + raws[1]
    for raw in raws[2:]:
        total += raw
    result = wrap(total, index)
    others = [t for t in inputs if t.get_device() != index]
    _record("reduce", [result, *others], index)
    return result


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[Any] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.Stream | None] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Chunks of ``tensor`` (CPU or GPU) along ``dim``, one on each of ``devices``.

    Args:
        chunk_sizes: sizes along ``dim``; even if None (fewer chunks than devices if it is short).
        streams: where to issue the copies; the current streams if None.
        out: tensors to copy into, instead of ``devices``.
    """
    if out is not None:
        sizes = [t.size(dim) for t in out]
        for target, chunk in zip(out, tensor.split(sizes, dim), strict=True):
            target.copy_(chunk, non_blocking=True)
        return tuple(out)
    indices = _indices(devices or [])
    chunks = (
        tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(indices), dim)
    )
    return tuple(
        _send(chunk, index, streams[n] if streams else None)
        for n, (chunk, index) in enumerate(zip(chunks, indices, strict=False))
    )


def _send(chunk: torch.Tensor, index: int, stream: torch.Stream | None) -> torch.Tensor:
    if chunk.get_device() == index:
        return chunk
    with use_stream(stream):
        return move(chunk.detach(), _device(index), non_blocking=True)


def gather(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    destination: Any = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``tensors`` of several GPUs, one after the other along ``dim``, on ``destination``.

    Args:
        destination: index or device; the CPU if "cpu" or -1.
        out: the tensor to fill, instead of ``destination``.
    """
    if out is None:
        cpu = destination == "cpu" or destination == -1
        index = -1 if cpu else _get_device_index(destination, True)
        first = tensors[0]
        size = list(first.shape)
        size[dim] = sum(t.size(dim) for t in tensors)
        out = torch.empty(size, dtype=first.dtype, device=_device(index))
    start = 0
    for tensor in tensors:
        length = tensor.size(dim)
        out.narrow(dim, start, length).copy_(tensor.detach(), non_blocking=True)
        start += length
    return out
