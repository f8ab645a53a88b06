"""The devices as the scheduler sees them: streams, engines, events, and operations on several.

What an operation does is worked out as soon as it is issued: a stream is a first-in-first-out
queue, so its times follow from those before it.  A stream stops only before something that depends
on what has not been issued yet.  All times are whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..trace import MemorySample, Span
from ..virtual.record import COMM_STREAM, DEFAULT_STREAM, Collective, Copy, Entry, Kernel
from .contention import Traffic
from .cost import Costs, copy_seconds, nanoseconds
from .engines import Action, Engine, Event, Gate, Stream, Ways, reserve
from .threads import Thread


class Devices:
    """All GPUs of a scheduler.

    Args:
        rows: what the devices are called.
        allocated: bytes on each at the start, where known.
        merged: they are ranks, which meet in collectives, and not the GPUs of one process.
        per_node: ranks on one node.
        wake: called with (thread, time) when a thread that waits for an event may go on.
    """

    def __init__(
        self,
        costs: Costs,
        rows: list[str],
        allocated: Sequence[int],
        merged: bool,
        per_node: int,
        wake: Callable[[Thread, int], None],
    ) -> None:
        self.costs, self.rows, self.wake = costs, rows, wake
        self.merged, self.per_node = merged, per_node
        self.spans: list[Span] = []
        self.allocated = [*allocated, *[0] * (len(rows) - len(allocated))]
        known = zip(rows, allocated, strict=False)
        self.memory = [MemorySample(0.0, row, nbytes) for row, nbytes in known]
        self.streams: dict[tuple[int, int], Stream] = {}
        self.now = 0
        """No operation will be issued before this time."""
        self._depth = costs.profile.host.queue_depth
        self._launch = nanoseconds(costs.profile.host.launch_seconds)
        self._compute = [Engine() for _ in rows]
        self._traffic = [Traffic() for _ in rows]
        self._ways = Ways(costs.profile)
        self._events: dict[int, Event] = {}
        self._gates: dict[tuple[str, int], Gate] = {}
        self._sampled = [0] * len(rows)
        self._named = [0] * len(rows)
        self._unblocked: deque[Stream] = deque()

    def stream(self, device: int, number: int) -> Stream:
        """The stream of that number, made at its first use."""
        stream = self.streams.get((device, number))
        if stream is None:
            stream = self.streams[device, number] = Stream(device, number, self._depth)
        return stream

    # ------------------------------------------------------------------------- what threads ask for

    def room(self, entry: Entry) -> int:
        """When the launch queue has room for one more kernel."""
        ends = self.stream(entry.device, entry.stream).ends
        return ends[0] if len(ends) == self._depth else 0

    def compute(self, entry: Entry, at: int, cost: tuple[int, int, str]) -> None:
        """Issue a kernel of (nanoseconds, bytes, detail) at time ``at``."""
        self._put(self.stream(entry.device, entry.stream), self._kernel, at, entry, cost)

    def copy(self, entry: Entry, at: int) -> Event:
        """Issue a copy; returns what happens when it has ended."""
        copy: Copy = entry.ref
        streams = [self.stream(entry.device, entry.stream)]
        if min(copy.source, copy.target) >= 0 and copy.source != copy.target:
            here = entry.device == copy.source
            other = (copy.target, DEFAULT_STREAM) if here else (copy.source, copy.source_stream)
            streams.append(self.stream(*other))
        gate = Gate(len(streams))
        for stream in streams:
            self._put(stream, self._join_copy, at, entry, gate)
        return gate.done

    def collective(self, entry: Entry, at: int) -> None:
        """Issue a collective: on the caller's streams, or on NCCL's own and ordered after those."""
        group: Collective = entry.ref
        gate = self._gate(group)
        for device in (entry.device,) if group.group else group.devices:
            stream = self.stream(device, entry.stream)
            if not group.group and not group.asynchronous:
                self._put(stream, self._join_collective, at, entry, gate)
                continue
            before, own = Event(), self.stream(device, COMM_STREAM)
            self._put(stream, self._record, at, entry, before)
            self._put(own, self._wait, at, entry, before)
            self._put(own, self._join_collective, at, entry, gate)
            if not group.asynchronous:
                self._put(stream, self._wait, at, entry, gate.done)

    def _gate(self, group: Collective) -> Gate:
        """Ranks meet by group and sequence; within a process one entry stands for all devices.

        When one rank is looked at alone, the others are taken to arrive when it does.
        """
        if not group.group or not self.merged:
            return Gate(1 if group.group else len(group.devices))
        key = (group.group, group.sequence)
        gate = self._gates.setdefault(key, Gate(len(group.devices)))
        gate.issued += 1
        if gate.issued == gate.needed:
            del self._gates[key]
        return gate

    def sample(self, entry: Entry, at: int) -> None:
        """Change the bytes that a device holds, once its stream has come so far."""
        self._put(self.stream(entry.device, entry.stream), self._sample, at, entry, None)

    def record(self, entry: Entry, at: int) -> None:
        """Record an event."""
        event = self._events[entry.ref] = Event()
        self._put(self.stream(entry.device, entry.stream), self._record, at, entry, event)

    def event_time(self, number: int) -> int:
        """When that event happened, in nanoseconds."""
        return self._events[number].time

    def known_event(self, number: int) -> Event | None:
        """The event of that number, if it has been recorded."""
        return self._events.get(number)

    def wait(self, entry: Entry, at: int) -> None:
        """Let a stream wait for an event; for one that was never recorded nobody waits."""
        event = self._events.get(entry.ref)
        if event is not None:
            self._put(self.stream(entry.device, entry.stream), self._wait, at, entry, event)

    def all_done(self, entry: Entry, at: int) -> Event:
        """What a ``sync`` entry waits for."""
        what, which = entry.ref or ("device", -1)
        if what == "event":
            return self._events.get(which) or Event(0)
        streams = [
            stream
            for (device, number), stream in self.streams.items()
            if device == entry.device and (what == "device" or number == which)
        ]
        event = Event(len(streams))
        for stream in streams:
            self._put(stream, self._record, at, entry, event)
        return event

    def _put(self, stream: Stream, act: Action, at: int, entry: Entry, extra: Any) -> None:
        """Give ``stream`` something to do that was issued at time ``at``."""
        if stream.pending or not act(stream, at, entry, extra):
            stream.pending.append((act, at, entry, extra))
        while self._unblocked:
            stream = self._unblocked.popleft()
            pending = stream.pending
            while pending and pending[0][0](stream, *pending[0][1:]):
                pending.popleft()

    # ------------------------------------------------------------------------- what streams can do

    def _kernel(self, stream: Stream, at: int, entry: Entry, cost: tuple[int, int, str]) -> bool:
        """Compute; kernels of one device take turns, since a large one fills the GPU."""
        length, nbytes, detail = cost
        kernel, engine = _work(entry), self._compute[stream.device]
        start = engine.fit(max(stream.tail, at + self._launch), length)
        end = self._traffic[stream.device].end(
            start, length, lambda taken: self.costs.beside(kernel, taken)
        )
        stream.tail = end
        engine.take(start, end, self.now)
        stream.ends.append(end)
        kind = entry.phase or "forward"
        if kind == "forward" and not kernel.bytes_read:  # torch.ones and its like: no layer's work
            kind = "other"
        self.spans.append(
            Span(kernel.name, start / 1e9, end / 1e9, self.rows[stream.device],
                 stream.lane or self._name(stream), kind, nbytes, detail)
        )  # fmt: skip
        return True

    def _join_copy(self, stream: Stream, at: int, entry: Entry, gate: Gate) -> bool:
        """Copy, once the streams of both devices have come to it."""
        return self._meet(stream, at, gate, entry, self._start_copy)

    def _join_collective(self, stream: Stream, at: int, entry: Entry, gate: Gate) -> bool:
        """Communicate, once all devices' streams have come to it."""
        return self._meet(stream, at, gate, entry, self._start_collective)

    def _sample(self, stream: Stream, at: int, entry: Entry, extra: None) -> bool:
        """Note the bytes that the device holds from here on, not before the last such note."""
        device = stream.device
        time = self._sampled[device] = max(self._sampled[device], stream.tail, at)
        self.allocated[device] += entry.ref
        self.memory.append(MemorySample(time / 1e9, self.rows[device], self.allocated[device]))
        return True

    def _record(self, stream: Stream, at: int, entry: Entry, event: Event) -> bool:
        """Let ``event`` know that the stream has come to it."""
        self._reach(event, max(stream.tail, at))
        return True

    def _wait(self, stream: Stream, at: int, entry: Entry, event: Event) -> bool:
        """Go on only after ``event``."""
        if event.missing:
            if stream not in event.waiters:
                event.waiters.append(stream)
            return False
        stream.tail = max(stream.tail, event.time)
        return True

    def _meet(
        self, stream: Stream, at: int, gate: Gate, entry: Entry, start: Callable[[int, Entry], int]
    ) -> bool:
        """A stream has come to an operation on several; the last one starts it for all."""
        if not gate.done.missing:
            return True
        if stream not in gate.arrived:
            gate.arrived.append(stream)
            gate.ready = max(gate.ready, stream.tail, at + self._launch)
        if len(gate.arrived) < gate.needed:
            return False
        end = start(gate.ready, entry)
        for other in gate.arrived:
            other.tail = end
            if other is not stream:
                self._unblocked.append(other)
        self._reach(gate.done, end)
        return True

    def _start_copy(self, ready: int, entry: Entry) -> int:
        copy, kernel = entry.ref, _work(entry)
        length = nanoseconds(copy_seconds(kernel.bytes_read, copy, self.costs.profile))
        start = reserve(self._ways.of_copy(copy), ready, length, self.now)
        for device in sorted({copy.source, copy.target} - {-1}):
            self._show(kernel, device, start, start + length, "copy")
        return start + length

    def _start_collective(self, ready: int, entry: Entry) -> int:
        group, kernel = entry.ref, _work(entry)
        nbytes = kernel.bytes_written if group.op == "all_gather" else kernel.bytes_read
        nodes = _nodes(group.devices, self.per_node) if group.group else 1
        length, taken = self.costs.collective(group.op, nbytes, len(group.devices), nodes)
        devices = group.devices if self.merged or not group.group else (entry.device,)
        start = reserve(self._ways.of_collective(devices), ready, length, self.now)
        for device in devices:
            self._traffic[device].add(start, start + length, taken, self.now)
            self._show(kernel, device, start, start + length, "communication")
        return start + length

    def _show(self, kernel: Kernel, device: int, start: int, end: int, kind: str) -> None:
        span = Span(kernel.name, start / 1e9, end / 1e9, self.rows[device], kind, kind,
                    kernel.bytes_read, kernel.dtype)  # fmt: skip
        self.spans.append(span)

    def _name(self, stream: Stream) -> str:
        """Streams are numbered by first use, since PyTorch's own numbers differ between runs."""
        self._named[stream.device] += 1
        stream.lane = f"stream {self._named[stream.device]}"
        return stream.lane

    def _reach(self, event: Event, at: int) -> None:
        """One of the streams that ``event`` needs has come to it."""
        event.time = max(event.time, at)
        event.missing -= 1
        if event.missing:
            return
        for waiter in event.waiters:
            if isinstance(waiter, Stream):
                self._unblocked.append(waiter)
            else:
                self.wake(waiter, event.time)


def _nodes(ranks: Sequence[int], per_node: int) -> int:
    """On how many nodes the ranks are; for all of a large job without going through them."""
    if isinstance(ranks, range):
        return -(-len(ranks) // per_node)
    return len({rank // per_node for rank in ranks})


def _work(entry: Entry) -> Kernel:
    assert entry.kernel is not None, "copies and collectives carry a kernel"
    return entry.kernel


__all__ = ["Devices"]
