"""Watching virtual GPUs: the recorder's log, scheduled while it grows."""

from __future__ import annotations

from collections.abc import Sequence

from labutils import telemetry
from labutils.timing import profiles
from labutils.timing.schedule import Scheduler
from labutils.trace import Trace
from labutils.virtual import journal
from labutils.virtual.record import Entry
from labutils.virtual.state import MOST_DEVICES, state
from labutils.virtual.wall_source import WallSource


def source() -> VirtualSource | WallSource:
    """What ``lab.watch`` follows, for the pace that the virtual GPUs have now."""
    pacer = state.recorder.pacer
    return VirtualSource() if pacer is None else WallSource(pacer)


class VirtualSource:
    """Gives ``lab.watch`` the simulated trace of what the virtual GPUs are asked to do."""

    kind = "simulated"

    def __init__(self) -> None:
        self.hardware = state.profile
        self.rows: Sequence[str] = [f"GPU {i}" for i in range(state.devices)]
        self.capacity = dict(zip(self.rows, state.ledger.capacity, strict=False))

    def start(self) -> None:
        """Begin at this point of the log."""
        for index in range(state.devices):
            journal.sample_memory(index)
        ledger = state.ledger
        self._recorder = state.recorder  # lab.predict has one of its own meanwhile
        self._mark = self._recorder.count
        self._dropped = 0
        self._scheduler = Scheduler(
            profiles.load(state.profile),
            MOST_DEVICES,  # more may be made while this one follows
            tuple(ledger.allocated[: state.devices]),
            tuple(ledger.capacity),
            self._mark,
        )
        self.spans, self.memory = self._scheduler.spans, self._scheduler.memory
        telemetry.add_sink(self)

    def begin(self, name: str, kind: str) -> None:
        """A span begins (called by ``lab.span``)."""
        self._log("begin", name)

    def end(self, token: None) -> None:
        """The innermost span of this thread ends."""
        self._log("end", None)

    def poll(self) -> float:
        """Schedule what is new in the log; returns the simulated seconds reached."""
        entries, lost = self._recorder.since(self._mark)
        self._mark += len(entries) + lost
        self._dropped += lost
        self._scheduler.feed(entries)
        return max((s.end for s in self.spans[-100:]), default=0.0)

    def stop(self) -> Trace:
        """Schedule the rest; returns the whole trace."""
        telemetry.remove_sink(self)
        for index in range(state.devices):
            journal.sample_memory(index)
        state.recorder.host()
        self.poll()
        self._scheduler.finish()
        trace = self._scheduler.trace(self._dropped)
        rows = {*self.rows, *(s.device for s in trace.spans)}
        trace.memory = [m for m in trace.memory if m.device in rows]
        trace.capacity = {**self.capacity, **{r: b for r, b in self._now().items() if r in rows}}
        return trace

    def _now(self) -> dict[str, int]:
        return {f"GPU {i}": b for i, b in enumerate(state.ledger.capacity[: state.devices])}

    def _log(self, what: str, ref: object) -> None:
        recorder = state.recorder
        host = recorder.host()
        thread = recorder.speaker(host, 0)
        recorder.append(Entry(what, thread, -1, 0, host.phase, None, ref))
