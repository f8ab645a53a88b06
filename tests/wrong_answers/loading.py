"""Plausible wrong answers to the exercises of the lab on data loading."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch


def adds_both(workers: int, load: float, overhead: float, step: float) -> float:
    return load / max(workers, 1) + overhead + step


def forgets_no_workers(workers: int, load: float, overhead: float, step: float) -> float:
    return max(load / max(workers, 1) + overhead, step)


def divides_the_overhead(workers: int, load: float, overhead: float, step: float) -> float:
    return load + step if workers == 0 else max((load + overhead) / workers, step)


def takes_the_smaller(workers: int, load: float, overhead: float, step: float) -> float:
    return load + step if workers == 0 else min(load / workers + overhead, step)


def fits_the_difference(with_1: float, with_2: float) -> tuple[float, float]:
    return with_1 - with_2, with_2


def fits_no_overhead(with_1: float, with_2: float) -> tuple[float, float]:
    return with_1, 0.0


def fits_the_other_way(with_1: float, with_2: float) -> tuple[float, float]:
    load = 2 * (with_1 - with_2)
    return with_1 - load, load


def everything_to_everyone(samples: Iterable[Any], worker: int, workers: int) -> Iterable[Any]:
    return samples


def only_the_first_worker(samples: Iterable[Any], worker: int, workers: int) -> Iterable[Any]:
    return samples if worker == 0 else []


def blocks_without_the_rest(samples: Iterable[Any], worker: int, workers: int) -> Iterable[Any]:
    known = list(samples)
    size = len(known) // workers
    return known[worker * size : (worker + 1) * size]


def starts_without_steps(samples: Iterable[Any], worker: int, workers: int) -> Iterable[Any]:
    return islice(samples, worker, None)


def pads_to_a_constant(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = samples[0].new_zeros(len(samples), 10)
    for row, sample in zip(batch, samples):
        row[: len(sample)] = sample
    return batch, torch.tensor([len(sample) for sample in samples])


def cuts_to_the_shortest(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    shortest = min(len(sample) for sample in samples)
    lengths = torch.tensor([len(sample) for sample in samples])
    return torch.stack([sample[:shortest] for sample in samples]), lengths


def pads_in_front(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    batch = samples[0].new_zeros(len(samples), int(lengths.max()))
    for row, sample in zip(batch, samples):
        row[len(row) - len(sample) :] = sample
    return batch, lengths


def pads_as_floats(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    batch = torch.zeros(len(samples), int(lengths.max()))
    for row, sample in zip(batch, samples):
        row[: len(sample)] = sample
    return batch, lengths


def no_thread(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    for batch in loader:
        yield [tensor.pin_memory().to(device, non_blocking=True) for tensor in batch]


def everything_at_once(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    stream = torch.get_device_module(device).Stream()
    with torch.get_device_module(device).stream(stream):
        batches = [[t.pin_memory().to(device, non_blocking=True) for t in b] for b in loader]
    torch.get_device_module(device).current_stream().wait_stream(stream)
    yield from batches


def threaded(
    loader: Any, device: torch.device, depth: int, *, pin: bool = True, own_stream: bool = True,
    waits: bool = True, errors: bool = True, stops: bool = True, size: int | None = None,
) -> Iterator[Any]:  # fmt: skip
    """A prefetcher from which one thing can be left out."""
    gpu = torch.get_device_module(device)
    stream = gpu.Stream() if own_stream else gpu.default_stream()
    ready: queue.Queue[Any] = queue.Queue(depth if size is None else size)
    stop = threading.Event()

    def put(item: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.05)
                break

    def work() -> None:
        try:
            for batch in loader:
                if stop.is_set():
                    return
                with gpu.stream(stream):
                    source = [t.pin_memory() if pin else t for t in batch]
                    put(([t.to(device, non_blocking=True) for t in source], stream.record_event()))
            put(None)
        except Exception as error:
            put(error if errors else None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            if waits:
                gpu.current_stream().wait_event(item[1])
            yield item[0]
    finally:
        if stops:
            stop.set()
            thread.join()


def never_pins(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    return threaded(loader, device, depth, pin=False)


def on_the_same_stream(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    return threaded(loader, device, depth, own_stream=False)


def without_waiting(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    return threaded(loader, device, depth, waits=False)


def swallows_errors(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    return threaded(loader, device, depth, errors=False)


def never_stops(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    return threaded(loader, device, depth, stops=False)


def without_a_bound(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    return threaded(loader, device, depth, size=0)


WRONG: dict[str, list[Callable[..., Any]]] = {
    "seconds_per_batch": [adds_both, forgets_no_workers, divides_the_overhead, takes_the_smaller],
    "fit_loading": [fits_the_difference, fits_no_overhead, fits_the_other_way],
    "share_of_worker": [
        everything_to_everyone,
        only_the_first_worker,
        blocks_without_the_rest,
        starts_without_steps,
    ],
    "pad_batch": [pads_to_a_constant, cuts_to_the_shortest, pads_in_front, pads_as_floats],
    "prefetch": [
        no_thread,
        everything_at_once,
        never_pins,
        on_the_same_stream,
        without_waiting,
        swallows_errors,
        never_stops,
        without_a_bound,
    ],
}
