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
    """A device that runs behind its host, in real time."""

    def __init__(self, pending: float, work: float) -> None:
        self.work, self.free_at = work, time.monotonic() + pending

    def step(self) -> None:
        self.free_at = max(self.free_at, time.monotonic()) + self.work

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.free_at - time.monotonic()))


def run(answer: Callable[..., float], pending: float, work: float) -> str:
    """The answer's time of a step of ``work`` s; ``pending`` s of other work come before it.

    It is rounded to whole steps, and the best of three: another program may take the processor.
    """
    best = float("inf")
    for _ in range(3):
        device = Device(pending, work)
        best = min(best, answer(device.step, device.synchronize))
    return f"{round(best / work)} times what the step takes"


def cases(rng: random.Random) -> Iterator[tuple[float, float]]:
    yield from [(0.0, 0.03), (0.12, 0.03), (0.1, rng.randint(3, 5) / 100)]


hints = [
    "A launch returns when the work is asked for, not when it is done.",
    "synchronize() waits for the device: call it before you stop the clock.",
    "And before you start it: the device may still be busy with earlier work.",
]
