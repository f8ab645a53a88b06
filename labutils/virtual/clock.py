"""Simulated time between two events, as ``torch.cuda.Event.elapsed_time`` measures it."""

from __future__ import annotations

from labutils.timing import profiles
from labutils.timing.schedule import Scheduler
from labutils.virtual.state import state
from labutils.virtual.streams import Event


def elapsed(start: Event, end: Event) -> float:
    """Milliseconds from ``start`` to ``end``, of which the operations between them are simulated.

    Raises:
        RuntimeError: one of them has not been recorded, or so long ago that the operations since
            are no longer in the recorder's log.
    """
    if not start.number or not end.number:
        raise RuntimeError("Both events must be recorded before calculating elapsed time.")
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
