"""``torch.distributed`` on virtual GPUs: collectives and DDP between real processes, over gloo."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
)
from torch.utils._pytree import tree_leaves

from labutils.virtual import journal
from labutils.virtual.composite import OnDevice
from labutils.virtual.dispatch import Call
from labutils.virtual.operators import HANDLERS
from labutils.virtual.record import COMM_STREAM, Collective, Entry, Kernel
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor

_sequence: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_events = itertools.count(-1, -1)
"""Numbers of the events behind collectives; negative, so that they differ from a user's."""

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "recv_any_source_": "recv",
}


_LARGE = {
    "_allgather_base_": (0,),
    "allgather_into_tensor_coalesced_": (0,),
    "_reduce_scatter_base_": (1,),
    "reduce_scatter_tensor_coalesced_": (1,),
    "alltoall_base_": (0, 1),
}
"""Positions of the arguments that hold one part for each rank."""


def run_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a ``c10d`` operator on the wrapped tensors, and write it to the log."""
    call = Call(args, kwargs)
    packet = func.overloadpacket.__name__
    originals = {id(t.raw): t for t in call.inputs}
    if any(t.raw.is_meta for t in call.inputs):
        tokens = _Tokens(packet, len(_group(args)[1]))
        result = func(*[tokens.replace(a, n) for n, a in enumerate(args)], **kwargs)
        originals = tokens.originals
    else:
        result = func(*call.args, **call.kwargs)
    if call.inputs:
        _record(_NAMES.get(packet, packet.strip("_")), call, args)
    return _rewrap(_promise(result, originals), originals)


def _promise(result: Any, originals: dict[int, VirtualTensor]) -> Any:
    """``result`` with a work object whose future brings virtual tensors: DDP's hooks read it."""
    *tensors, boxed = result if isinstance(result, list | tuple) else (result,)
    try:
        future = dist.Work.unbox(boxed).get_future()
    except (RuntimeError, TypeError):  # gloo's reduce_scatter, send and recv have none
        return result
    virtual = future.then(lambda done: _rewrap(done.value(), originals))
    work = _create_work_from_future(virtual).boxed()
    return (*tensors, work) if tensors else work


class _Tokens:
    """Stand-ins with an element or one per rank: phantom ranks exchange these, so that they wait
    for each other, and time out or fail, as real ones do."""

    def __init__(self, packet: str, ranks: int) -> None:
        self.ranks = ranks
        self.large = _LARGE.get(packet, ())
        self.splits = packet == "alltoall_base_"
        self.kept: list[torch.Tensor] = []
        self.originals: dict[int, VirtualTensor] = {}
        """What each token stands for, by its id."""

    def replace(self, value: Any, position: int) -> Any:
        """``value`` (argument number ``position``) with tokens in the place of its tensors."""
        if isinstance(value, list | tuple):
            if self.splits and position > 1:
                return []  # split evenly
            return [self.replace(v, position) for v in value]
        if type(value) is not VirtualTensor:
            return value
        length = self.ranks if position in self.large else 1
        token = torch.zeros(length, dtype=value.dtype)
        self.kept.append(token)
        self.originals[id(token)] = value
        return token


def _rewrap(value: Any, originals: dict[int, VirtualTensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return originals.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_rewrap(v, originals) for v in value)
    return value


def _record(op: str, call: Call, args: tuple[Any, ...]) -> None:
    index = call.index
    tensors = call.inputs
    nbytes = max(_payload(args[0]), _payload(args[1]) if len(args) > 1 else 0)
    group, ranks = _group(args)
    collective = Collective(op, ranks, group, next(_sequence[group]), asynchronous=True)
    kernel = Kernel(op, "communication", str(tensors[0].dtype)[6:], 0, nbytes, nbytes)
    journal.record(index, kernel, tensors, tensors, "collective", collective)
    event = next(_events)
    recorder = state.recorder
    host = recorder.host()
    thread = recorder.speaker(host, index)
    recorder.append(Entry("record", thread, index, COMM_STREAM, host.phase, None, event))
    for tensor in tensors:
        tensor.block.event = event


def _payload(value: Any) -> int:
    return sum(
        t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, torch.Tensor)
    )


def _group(args: tuple[Any, ...]) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of the process group among the arguments of a ``c10d`` operator."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(value)
                return group.group_name, tuple(dist.get_process_group_ranks(group))
            except (RuntimeError, ValueError, TypeError, AttributeError):
                continue
    return "", ()


class VirtualReducer(dist.Reducer):
    """DDP's reducer, with its buckets on the virtual GPU of the parameters."""

    def __init__(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
        self._device = parameters[0].index
        with OnDevice(self._device, floating_only=True):
            super().__init__(parameters, *args, **kwargs)

    def _rebuild_buckets(self) -> bool:
        with OnDevice(self._device, floating_only=True):
            return bool(super()._rebuild_buckets())


def _native(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which is C++ and issues its operations without Python, marked in the log."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not state.devices:
            return original(*args, **kwargs)
        host = state.recorder.host()
        host.native = True
        try:
            return original(*args, **kwargs)
        finally:
            host.native = False

    return function


def install() -> None:
    """Let gloo serve "vgpu", and DDP keep its buckets there."""
    if not dist.is_available():
        return
    HANDLERS["c10d"] = run_collective
    dist.Backend.backend_capability["gloo"].append("vgpu")
    dist.Backend.default_device_backend_map["vgpu"] = "gloo"
    dist._broadcast_coalesced = _native(dist._broadcast_coalesced)
    original = dist.Reducer

    @functools.wraps(original, updated=())
    def reducer(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        virtual = type(parameters[0]) is VirtualTensor
        return (VirtualReducer if virtual else original)(parameters, *args, **kwargs)

    dist.Reducer = reducer  # type: ignore[misc, assignment]
