"""What computation and communication take from each other on one GPU.

A collective is a kernel too.  NCCL runs one thread block per channel, each of which keeps a whole
multiprocessor and moves about ``collective_processor_bandwidth`` ("NCCL uses the minimal number of
SMs to achieve the performance of the platform": 2 for a network of 12 to 24 GB/s, 16 for 190 GB/s;
its blocks share no multiprocessor with others: NVIDIA/nccl#689).  And every byte that a ring sends
passes the GPU's memory ``collective_memory_passes`` times.  What computes beside it has the rest:
fewer multiprocessors, so that its tiles take more waves, and less bandwidth.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .profiles import Profile

FEWEST = 2
"""Thread blocks of a collective on a GPU (NVIDIA/nccl#689)."""
MOST = 0.9
"""Of a GPU that a collective takes at most: what computes beside it never stands still."""


class Load(NamedTuple):
    """What a collective takes from the GPU that it runs on."""

    processors: float
    """Multiprocessors; on a processor of a single core, a part of its time."""
    bandwidth: float
    """Share of the memory bandwidth, 0 to ``MOST``."""


def load(nbytes: float, seconds: float, profile: Profile) -> Load:
    """What a collective takes that sends ``nbytes`` from each GPU in ``seconds``."""
    rate, gpu, model = nbytes / seconds, profile.gpu, profile.model
    processors = rate / model.collective_processor_bandwidth
    moved = rate * model.collective_memory_passes
    share = moved / (gpu.memory_bandwidth * model.memory_efficiency)
    if gpu.multi_processor_count > FEWEST:
        processors = max(FEWEST, math.ceil(processors))
    else:  # a core that is away moves no memory either
        share = max(share, processors / gpu.multi_processor_count)
    return Load(min(processors, MOST * gpu.multi_processor_count), min(share, MOST))


def beside(profile: Profile, taken: Load) -> Profile:
    """``profile`` as it is for a kernel beside a collective: with a smaller GPU."""
    gpu = profile.gpu
    left = gpu.multi_processor_count - taken.processors
    peak = {kind: rate * left / gpu.multi_processor_count for kind, rate in gpu.peak.items()}
    smaller = replace(
        gpu, multi_processor_count=max(1, round(left)), peak=peak,
        memory_bandwidth=gpu.memory_bandwidth * (1 - taken.bandwidth),
    )  # fmt: skip
    return replace(profile, gpu=smaller)


class Traffic:
    """When collectives run on one device (whole nanoseconds), and what kernels lose by it."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, Load]] = []
        """(end, start, load), by end: those of one stream follow each other."""

    def add(self, start: int, end: int, taken: Load, now: int) -> None:
        """A collective runs; nothing will ask for times before ``now`` again."""
        if self._runs and self._runs[0][0] <= now:
            del self._runs[: bisect_right(self._runs, (now, math.inf))]
        insort(self._runs, (end, start, taken))

    def end(self, start: int, length: int, slowed: Callable[[Load], int]) -> int:
        """When work ends that takes ``length`` alone, and ``slowed(load)`` beside a collective."""
        runs = self._runs
        if not runs or runs[-1][0] <= start:
            return start + length
        left = float(length)
        for stop, begin, taken in runs[bisect_right(runs, (start, math.inf)) :]:
            if begin >= start + left:
                break
            if begin > start:
                left, start = left - (begin - start), begin
            pace = length / max(length, slowed(taken))
            if left <= (stop - start) * pace:
                return start + round(left / pace)
            left, start = left - (stop - start) * pace, stop
        return start + round(left)


__all__ = ["Load", "Traffic", "beside", "load"]
