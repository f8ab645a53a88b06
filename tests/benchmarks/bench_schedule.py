"""Speed of the scheduler: seconds for 100,000 log entries on one core."""

from __future__ import annotations

import time

from labutils.timing import profiles
from labutils.timing.schedule import schedule
from labutils.virtual.record import Entry, Graph, Kernel

ENTRIES = 100_000
KERNELS = [Kernel(f"k{n}", "elementwise", "float32", 0, 9000 * n, 9000 * n) for n in range(100)]


def one_thread() -> list[Entry]:
    """A training loop on one GPU: two kernels, then a change of memory."""
    step = [
        Entry("kernel", "main", 0, 0, "forward", KERNELS[n]) for n in range(100) for _ in range(2)
    ]
    change = Entry("memory", "main", 0, 0, "forward", None, 512)
    lines = [line for n in range(0, 200, 2) for line in (*step[n : n + 2], change)]
    return (lines * (ENTRIES // len(lines) + 1))[:ENTRIES]


def four_threads() -> list[Entry]:
    """DataParallel's forward: four threads that compete for the GIL, started for each batch."""
    lines: list[Entry] = []
    for batch in range(10**9):
        names = [f"Thread-{4 * batch + n} (_worker)" for n in range(4)]
        lines += [Entry("fork", "main", -1, 0, "", None, name) for name in names]
        for work in KERNELS:
            lines += [
                Entry("kernel", name, gpu, 0, "forward", work) for gpu, name in enumerate(names)
            ]
        lines += [Entry("join", "main", -1, 0, "", None, name) for name in names]
        lines.append(Entry("kernel", "main", 0, 0, "forward", KERNELS[1]))
        if len(lines) >= ENTRIES:
            break
    return lines


def seconds(lines: list[Entry]) -> float:
    """The best of three, per 100,000 entries."""
    profile, best = profiles.load("A100-SXM4-80GB"), float("inf")
    for _ in range(3):
        start = time.perf_counter()
        schedule(Graph(lines, devices=4), profile)
        best = min(best, time.perf_counter() - start)
    return best * ENTRIES / len(lines)


def measure() -> list[tuple[str, float, float]]:
    """(name, seconds, at most)."""
    return [
        ("scheduler, one thread: s per 100,000 entries", seconds(one_thread()), 1.0),
        ("scheduler, four threads: s per 100,000 entries", seconds(four_threads()), 1.0),
    ]
