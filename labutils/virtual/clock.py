"""Simulated time between two events, as ``torch.cuda.Event.elapsed_time`` measures it."""

from __future__ import annotations

from labutils.timing import profiles
from labutils.timing.schedule import Scheduler
from labutils.virtual.state import state
from labutils.virtual.streams import Event
from labutils.virtual.wall import Pacer


def elapsed(start: Event, end: Event) -> float:
    """Milliseconds from ``start`` to ``end``, of which the operations between them are simulated.

    Raises:
        RuntimeError: one of them has not been recorded, or so long ago that the operations since
            are no longer in the recorder's log; in real time, one of them has not happened yet.
    """
    if not start.number or not end.number:
        raise RuntimeError("Both events must be recorded before calculating elapsed time.")
    pacer = state.recorder.pacer
    if pacer is not None:
        return _passed(pacer, start, end)
    first = min(start.position, end.position)
    entries, lost = state.recorder.since(first)
    if lost:
        raise RuntimeError(
            f"{lost} operations between the two events are no longer recorded; "
            "record the events closer together."
        )
    scheduler = Scheduler(profiles.load(state.profile), state.devices, first=first)
    scheduler.feed(entries)
    scheduler.finish()
    return 1e3 * (scheduler.event_seconds(end.number) - scheduler.event_seconds(start.number))


def _passed(pacer: Pacer, start: Event, end: Event) -> float:
    """Milliseconds between two events that have happened in real time."""
    times = [pacer.event_time(event.number) for event in (start, end)]
    if times[0] is None or times[1] is None:
        raise RuntimeError(
            "Both events must be recorded after lab.virtual.enable(...) to tell the time between."
        )
    if not all(pacer.passed(time) for time in times if time):
        raise RuntimeError(
            "Both events must be completed before calculating elapsed time: call "
            "torch.vgpu.synchronize() first."
        )
    return (times[1] - times[0]) / 1e6
