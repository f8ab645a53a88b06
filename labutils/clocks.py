"""The clocks of a rank's device: a moment is marked now, and its time looked up later."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """The host's monotonic clock: a mark is its time in nanoseconds."""

    def mark(self) -> Any:
        return time.monotonic_ns()

    def passed(self, moment: Any) -> bool:
        """Whether the device has reached this mark."""
        return True

    def nanoseconds(self, moment: Any) -> int:
        return int(moment)


class CudaClock(HostClock):
    """A mark is an event on the current stream; its time is known once the stream has passed it."""

    def __init__(self) -> None:
        self.base = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.base.record()
        torch.cuda.synchronize()
        self.base_ns = time.monotonic_ns()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, moment: Any) -> bool:
        return isinstance(moment, int) or bool(moment.query())

    def nanoseconds(self, moment: Any) -> int:
        if isinstance(moment, int):  # of the host: time spent waiting for other ranks
            return moment
        time_ns = self.base_ns + round(self.base.elapsed_time(moment) * 1e6)
        if time_ns - self.base_ns > 10**9:  # float32 milliseconds are exact while small
            self.base, self.base_ns = moment, time_ns
        return time_ns
