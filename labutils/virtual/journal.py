"""Writing to the recorder: which thread, stream and phase an operation belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labutils.virtual.record import NATIVE, Entry, HostThread, Kernel
from labutils.virtual.state import state
from labutils.virtual.streams import current_stream_id
from labutils.virtual.tensor import VirtualTensor


def record(
    index: int,
    kernel: Kernel,
    inputs: Sequence[VirtualTensor],
    outputs: Sequence[VirtualTensor],
    what: str = "kernel",
    ref: Any = None,
    *,
    issuer: int | None = None,
) -> None:
    """Write one operation, and the memory that it leaves allocated, to the log.

    Args:
        index: the device whose stream it is given to.
        inputs, outputs: the tensors that it reads and makes, for the order between threads.
        issuer: the device whose autograd thread issues it in a backward; ``index`` if None.
    """
    recorder = state.recorder
    host = recorder.host()
    thread = recorder.speaker(host, index if issuer is None else issuer)
    stream = current_stream_id(index)
    phase = host.phase or ("backward" if host.task != -1 else "forward")
    if host.native and what == "kernel":
        ref = NATIVE
    if host.task != -1:
        _keep_order(host, thread, inputs)
    for tensor in inputs:
        if tensor.block.event:
            _wait_for_collective(tensor, index, stream, thread, phase)
    change = recorder.memory_change(index, state.ledger.allocated[index])
    memory = Entry("memory", thread, index, stream, phase, None, change) if change else None
    number = recorder.append(Entry(what, thread, index, stream, phase, kernel, ref), memory)
    if host.task != -1:
        writer = (thread, number)
        for tensor in outputs or inputs[:1]:
            tensor.block.writer = writer


def sample_memory(index: int) -> None:
    """Write the change of the device's allocated bytes since its last line to the log."""
    change = state.recorder.memory_change(index, state.ledger.allocated[index])
    if change:
        note("memory", index, change)


def note(what: str, index: int, ref: Any = None) -> None:
    """Write a line that is no operation, such as a wait of the host, to the log."""
    recorder = state.recorder
    host = recorder.host()
    thread = recorder.speaker(host, index)
    recorder.append(Entry(what, thread, index, current_stream_id(index), host.phase, None, ref))


def _keep_order(host: HostThread, thread: str, inputs: Sequence[VirtualTensor]) -> None:
    """Within a backward, wait for the engine's other threads that made the inputs."""
    latest: dict[str, int] = {}
    for tensor in inputs:
        writer = tensor.block.writer
        if writer is not None and writer[0] != thread and writer[1] >= host.task_start:
            latest[writer[0]] = max(writer[1], latest.get(writer[0], 0))
    for name in sorted(latest) if latest else ():
        state.recorder.append(Entry("after", thread, -1, 0, "backward", None, latest[name]))


def _wait_for_collective(
    tensor: VirtualTensor, index: int, stream: int, thread: str, phase: str
) -> None:
    """Let the stream wait for the collective that owns ``tensor``, as ``work.wait()`` does."""
    state.recorder.append(Entry("wait", thread, index, stream, phase, None, tensor.block.event))
    tensor.block.event = 0
