"""Plausible wrong answers to the exercises of the first notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Bars = list[tuple[float, float]]


def throughput_of_one_gpu(samples_per_gpu: int, gpus: int, step_s: float) -> float:
    return samples_per_gpu / step_s


def throughput_of_a_global_batch(samples_per_gpu: int, gpus: int, step_s: float) -> float:
    return samples_per_gpu / gpus / step_s


def seconds_of_a_sample(samples_per_gpu: int, gpus: int, step_s: float) -> float:
    return step_s / (samples_per_gpu * gpus)


def speedup_of_times(one_gpu: float, many_gpus: float) -> float:
    return one_gpu / many_gpus


def speedup_as_gain(one_gpu: float, many_gpus: float) -> float:
    return many_gpus / one_gpu - 1


def speedup_as_difference(one_gpu: float, many_gpus: float) -> float:
    return many_gpus - one_gpu


def efficiency_as_speedup(one_gpu: float, many_gpus: float, gpus: int) -> float:
    return many_gpus / one_gpu


def efficiency_of_times(one_gpu: float, many_gpus: float, gpus: int) -> float:
    return one_gpu / (gpus * many_gpus)


def efficiency_of_the_loss(one_gpu: float, many_gpus: float, gpus: int) -> float:
    return 1 - many_gpus / (gpus * one_gpu)


def utilisation_by_sum(bars: Bars, start: float, end: float) -> float:
    return sum(right - left for left, right in bars) / (end - start)


def utilisation_by_extent(bars: Bars, start: float, end: float) -> float:
    return max((b for _, b in bars), default=0) - min((a for a, _ in bars), default=0)


def utilisation_that_counts_overlaps_twice(bars: Bars, start: float, end: float) -> float:
    inside = [(max(a, start), min(b, end)) for a, b in bars]
    return min(1.0, sum(max(0.0, b - a) for a, b in inside) / (end - start))


def utilisation_that_forgets_a_longer_bar(bars: Bars, start: float, end: float) -> float:
    busy, covered_until = 0.0, start
    for left, right in sorted(bars):
        left, right = max(left, covered_until), min(right, end)
        busy += max(0.0, right - left)
        covered_until = right
    return busy / (end - start)


WRONG: dict[str, list[Callable[..., Any]]] = {
    "throughput": [
        throughput_of_one_gpu,
        throughput_of_a_global_batch,
        seconds_of_a_sample,
    ],
    "speedup": [speedup_of_times, speedup_as_gain, speedup_as_difference],
    "scaling_efficiency": [efficiency_as_speedup, efficiency_of_times, efficiency_of_the_loss],
    "utilisation": [
        utilisation_by_sum,
        utilisation_by_extent,
        utilisation_that_counts_overlaps_twice,
        utilisation_that_forgets_a_longer_bar,
    ],
}
