"""Watching virtual GPUs: the recorder's log, scheduled while it grows."""

from __future__ import annotations

from labutils import telemetry
from labutils.timing import profiles
from labutils.timing.schedule import Scheduler
from labutils.trace import Trace
from labutils.virtual import journal
from labutils.virtual.record import Entry
from labutils.virtual.state import state


class VirtualSource:
    """Gives ``lab.watch`` the simulated trace of what the virtual GPUs are asked to do."""

    kind = "simulated"

    def __init__(self) -> None:
        self.hardware = state.profile
        self.rows = [f"GPU {i}" for i in range(state.devices)]
        self.capacity = dict(zip(self.rows, state.ledger.capacity, strict=False))

    def start(self) -> None:
        """Begin at this point of the log."""
        for index in range(state.devices):
            journal.sample_memory(index)
        devices, ledger = state.devices, state.ledger
        self._recorder = state.recorder  # lab.predict has one of its own meanwhile
        self._mark = self._recorder.count
        self._dropped = 0
        self._scheduler = Scheduler(
            profiles.load(state.profile),
            devices,
            tuple(ledger.allocated[:devices]),
            tuple(ledger.capacity[:devices]),
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
        return self._scheduler.trace(self._dropped)

    def _log(self, what: str, ref: object) -> None:
        recorder = state.recorder
        host = recorder.host()
        thread = recorder.speaker(host, 0)
        recorder.append(Entry(what, thread, -1, 0, host.phase, None, ref))
