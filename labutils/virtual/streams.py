"""Streams and events of virtual GPUs, and which device and stream each host thread uses."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from typing_extensions import Self

from labutils.virtual.record import DEFAULT_STREAM, Entry
from labutils.virtual.state import state

_PRIVATE_USE_1 = 20
"""c10::DeviceType::PrivateUse1, the type behind "vgpu"."""

_stream_ids = itertools.count(1)
_event_ids = itertools.count(1)


class _Here(threading.local):
    """The current device of this thread, and its current stream on each device."""

    device = 0

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


_here = _Here()


def current_device() -> int:
    """Index of the virtual GPU that this thread uses."""
    return _here.device


def set_device(device: Any) -> None:
    """Make ``device`` (index, string or ``torch.device``) this thread's virtual GPU."""
    _here.device = index_of(device)


def current_stream_id(device: int) -> int:
    """Number of this thread's current stream on ``device``."""
    streams = _here.streams
    return streams[device].stream_id if streams and device in streams else DEFAULT_STREAM


def index_of(device: Any, *, current: bool = True) -> int:
    """The index that ``device`` means.

    Args:
        device: an index, "vgpu", "vgpu:2", a ``torch.device``, or None.
        current: take None and "vgpu" for the current device.

    Raises:
        ValueError: it is no virtual GPU, or there are not that many.
    """
    if isinstance(device, torch.device | str):
        device = torch.device(device)
        if device.type != "vgpu":
            raise ValueError(f"Expected a vgpu device, but got {device}.")
        device = device.index
    if device is None and current:
        return _here.device
    index = int(device)
    if not 0 <= index < state.devices:
        raise ValueError(
            f"vgpu:{index} does not exist: {state.known()}. lab.gpus(n) makes n of them."
        )
    return index


def _log(what: str, device: int, stream: int, ref: Any = None) -> None:
    recorder = state.recorder
    host = recorder.host()
    thread = recorder.speaker(host, device)
    recorder.append(Entry(what, thread, device, stream, host.phase, ref=ref))


class Stream(torch.Stream):
    """A queue of work on one virtual GPU, with the methods of ``torch.cuda.Stream``."""

    def __new__(
        cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> Self:
        number = next(_stream_ids) if stream_id is None else stream_id
        made: Self = super().__new__(
            cls, stream_id=number, device_index=index_of(device), device_type=_PRIVATE_USE_1
        )
        return made

    def wait_event(self, event: torch.Event) -> None:
        """Work given to this stream from now on waits for ``event``."""
        if isinstance(event, Event) and event.number:
            _log("wait", self.device_index, self.stream_id, event.number)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Work given to this stream from now on waits for what ``stream`` has been given so far."""
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record ``event`` (a new one if None) behind the work given to this stream so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits until this stream has nothing left to do."""
        _log("sync", self.device_index, self.stream_id, ("stream", self.stream_id))

    def query(self) -> bool:
        """Whether all work is done: true unless in real time, since the rest is simulated later."""
        pacer = state.recorder.pacer
        return pacer is None or pacer.passed(pacer.done(self.device_index, self.stream_id))

    def __enter__(self) -> Self:
        self._previous = (_here.device, _here.streams.get(self.device_index))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        device, stream = self._previous
        _here.device = device
        if stream is None:
            _here.streams.pop(self.device_index, None)
        else:
            _here.streams[self.device_index] = stream


class Event(torch.Event):
    """A marker in a stream, with the methods of ``torch.cuda.Event``."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Self:
        made: Self = super().__new__(cls, device="vgpu:0", enable_timing=enable_timing)
        return made

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.number = 0
        """0 until recorded."""
        self.position = 0
        """Where in the recorder's log it was recorded last."""

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark this point of ``stream`` (the current one if None)."""
        stream = current_stream() if stream is None else stream
        self.number = next(_event_ids)
        self.position = state.recorder.count
        _log("record", stream.device_index, stream.stream_id, self.number)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Work given to ``stream`` (the current one if None) from now on waits for this event."""
        stream = current_stream() if stream is None else stream
        stream.wait_event(self)

    def synchronize(self) -> None:
        """The host waits for this event."""
        if self.number:
            _log("sync", current_device(), DEFAULT_STREAM, ("event", self.number))

    def query(self) -> bool:
        """Whether it has happened: true unless in real time, since the rest is simulated later."""
        pacer = state.recorder.pacer
        return pacer is None or pacer.passed(pacer.event_time(self.number) or 0)

    def elapsed_time(self, end_event: Any) -> float:
        """Simulated milliseconds from this event to ``end_event``."""
        from labutils.virtual.clock import elapsed

        return elapsed(self, end_event)


def current_stream(device: Any = None) -> Stream:
    """This thread's current stream on ``device`` (the current device if None)."""
    index = index_of(device)
    return _here.streams.get(index) or Stream(index, stream_id=DEFAULT_STREAM)


def default_stream(device: Any = None) -> Stream:
    """The stream that work goes to unless another is chosen."""
    return Stream(index_of(device), stream_id=DEFAULT_STREAM)


def set_stream(stream: torch.Stream | None) -> None:
    """Make ``stream`` current on its device, and its device current."""
    if stream is not None:
        _here.device = stream.device_index
        _here.streams[stream.device_index] = stream  # type: ignore[assignment]


def synchronize(device: Any = None) -> None:
    """The host waits until ``device`` has nothing left to do."""
    _log("sync", index_of(device), DEFAULT_STREAM)


class on_device:  # noqa: N801 - named like torch.cuda.device, a context manager in lower case
    """Within the ``with`` block, ``device`` is the current virtual GPU; None changes nothing."""

    def __init__(self, device: Any) -> None:
        self.index = None if device is None or device == -1 else index_of(device)

    def __enter__(self) -> None:
        self.previous = _here.device
        if self.index is not None:
            _here.device = self.index

    def __exit__(self, *_: object) -> None:
        _here.device = self.previous


class stream:  # noqa: N801 - named like torch.cuda.stream
    """Within the ``with`` block, ``stream`` is current; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *args: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*args)
