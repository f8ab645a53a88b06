"""Recording a program on virtual GPUs of its own, beside those that the user has.

Within :func:`isolated` this process has fresh phantom GPUs: an empty ledger, an empty log, and
random numbers of their own.  Afterwards all is as it was.  :class:`LoneGroup` lets real
``DistributedDataParallel`` run there as one rank of many, without the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from labutils.virtual import device, journal, streams
from labutils.virtual.memory import Ledger
from labutils.virtual.record import COMM_STREAM, Collective, Entry, HostThread, Kernel, Recorder
from labutils.virtual.state import state
from labutils.virtual.tensor import VirtualTensor

BOUNDLESS = 1 << 60
"""Bytes of a GPU on which everything fits: what is recorded can be compared with any capacity."""

GROUP = "alone"
"""Name of the group of a :class:`LoneGroup` in the log."""


@contextmanager
def isolated(devices: int = 1, capacity: int = BOUNDLESS) -> Iterator[None]:
    """Have ``devices`` phantom GPUs of ``capacity`` bytes, recorded apart from all others.

    The calling thread counts as the program's main thread.  Tensors made inside must not be used
    outside, nor those of outside inside.
    """
    names = ("devices", "phantom", "profile", "ledger", "recorder")
    before = {name: getattr(state, name) for name in names}
    here = streams._here
    place = here.device, here.streams
    recorder = Recorder()
    recorder._local.host = HostThread("main")
    with torch.random.fork_rng(devices=[]):
        try:
            state.ledger, state.recorder = Ledger(devices, capacity), recorder
            state.devices, state.phantom = devices, True
            here.device, here.streams = 0, {}
            device.register()
            yield
        finally:
            for name, value in before.items():
                setattr(state, name, value)
            here.device, here.streams = place


class LoneGroup(dist.ProcessGroup):
    """A process group of ``size`` ranks of which only rank 0 exists.

    Collectives change nothing and are written to the log of the virtual GPUs, as those of a real
    group are.
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self._ranks = tuple(range(size))
        self._sequence = itertools.count()
        self._events = itertools.count(-1, -1)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return "alone"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._finish("all_reduce", tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._finish("broadcast", tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for received, sent in zip(outputs, inputs, strict=True):
            for tensor in received:
                tensor.copy_(sent)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(outputs)
        return _create_work_from_future(future)

    def _finish(self, op: str, tensors: list[torch.Tensor]) -> Any:
        virtual = [t for t in tensors if type(t) is VirtualTensor]
        if virtual:
            self._record(op, virtual)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(tensors)
        return _create_work_from_future(future)

    def _record(self, op: str, tensors: list[VirtualTensor]) -> None:
        first, index = tensors[0], tensors[0].index
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        kernel = Kernel(op, "communication", str(first.dtype)[6:], 0, nbytes, nbytes)
        ref = Collective(op, self._ranks, GROUP, next(self._sequence), asynchronous=True)
        journal.record(index, kernel, tensors, tensors, "collective", ref)
        event, host = next(self._events), state.recorder.host()
        thread = state.recorder.speaker(host, index)
        state.recorder.append(Entry("record", thread, index, COMM_STREAM, host.phase, None, event))
        for tensor in tensors:
            tensor.block.event = event


__all__ = ["BOUNDLESS", "GROUP", "LoneGroup", "isolated"]
