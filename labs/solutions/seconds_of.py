"""How long does a step take on a GPU?"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

lab = "06"


def seconds_of(step: Callable[[], object], synchronize: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


class Device:
    """A device that runs behind its host, on a clock of its own: exact, and nobody waits."""

    def __init__(self, pending: float, launch: float, work: float) -> None:
        self.now, self.free_at = 100.0, 100.0 + pending
        self.launch, self.work = launch, work

    def step(self) -> None:
        self.now += self.launch
        self.free_at = max(self.free_at, self.now) + self.work

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def clock(self) -> float:
        return self.now

    def clock_ns(self) -> int:
        return round(self.now * 1e9)


def run(answer: Callable[..., float], pending: float, launch: float, work: float) -> float:
    """The answer's time of a step of ``work`` s, asked for in ``launch`` s.

    Before it, ``pending`` s of other work are still to be done.
    """
    device = Device(pending, launch, work)
    clocks = {
        "perf_counter": device.clock,
        "time": device.clock,
        "perf_counter_ns": device.clock_ns,
    }
    kept = {name: getattr(time, name) for name in clocks}
    try:
        for name, clock in clocks.items():
            setattr(time, name, clock)
        return answer(device.step, device.synchronize)
    finally:
        for name, function in kept.items():
            setattr(time, name, function)


def cases(rng: random.Random) -> Iterator[tuple[float, float, float]]:
    yield from [(0.0, 0.001, 0.5), (2.0, 0.001, 0.5), (1.0, 0.002, rng.randint(1, 9) / 10)]


hints = [
    "A launch returns when the work is asked for, not when it is done.",
    "synchronize() waits for the device: call it before you stop the clock.",
    "And before you start it: the device may still be busy with earlier work.",
]
