"""Measuring a user's loader and step without using up either's state."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader

from labutils.loading.loader import twin
from labutils.loading.worker import Envelope

Step = Callable[[Any], Any]
_LARGE = 1 << 20
_ENDLESS = 1_000_000


@dataclass(frozen=True, slots=True)
class Setting:
    """What is chosen for a loader."""

    num_workers: int
    pin_memory: bool = False
    prefetch_factor: int | None = None

    def __str__(self) -> str:
        text = f"num_workers={self.num_workers}, pin_memory={self.pin_memory}"
        return text + (f", prefetch_factor={self.prefetch_factor}" if self.num_workers else "")

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of DataLoader."""
        factor = (self.prefetch_factor or 2) if self.num_workers else None
        return {"num_workers": self.num_workers, "pin_memory": self.pin_memory,
                "prefetch_factor": factor}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run of batches took; all per batch and in seconds, except ``start_s`` (once)."""

    setting: Setting
    batches: int
    seconds: float
    """From batch to batch, in steady state."""
    wait_s: float
    """Of these, waiting for the batch."""
    load_s: float
    """Making a batch, in the worker (or here)."""
    load_cpu_s: float
    queued_s: float
    """Of ``load_s``, waiting for a free core."""
    collate_s: float
    start_s: float
    """Until the first batch was there."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers of torch, NumPy and Python go on afterwards as if nothing had happened."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def run(
    loader: DataLoader[Any],
    setting: Setting,
    step: Step | None,
    seconds: float,
    dataset: Any = None,
) -> tuple[Measured, Any]:
    """Load with ``setting`` (and train, with a ``step``) for about ``seconds`` in steady state.

    Returns the measurement and the last batch.  Before the steady state is reached each worker has
    delivered a batch; these do not count.

    Raises:
        ValueError: the loader yields no batch.
    """
    other = {} if dataset is None else {"dataset": dataset}
    copy = twin(loader, _ENDLESS, **setting.options, persistent_workers=False, **other)
    copy.made.clear()
    asked = time.perf_counter()
    batches = iter(copy)
    try:
        first = next(batches, _NONE)
        if first is _NONE:
            raise ValueError("the loader yields no batch: its data set or sampler is empty.")
        started = time.perf_counter() - asked
        counted, spent, waited, last = _steady(batches, first, step, setting, seconds)
    finally:
        batches.close()
    made = list(copy.made)[1:] or list(copy.made)
    return _measured(setting, made, counted, spent, waited, started), last


def alone(step: Step, batch: Any, seconds: float) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, of a step on a batch that is there already."""
    step(batch)
    synchronise()
    count, began, cpu = 0, time.perf_counter(), time.process_time()
    while count < 3 or time.perf_counter() - began < seconds:
        step(batch)
        count += 1
        if count % 3 == 0:
            synchronise()
    synchronise()
    return (time.perf_counter() - began) / count, (time.process_time() - cpu) / count


def synchronise() -> None:
    """Wait for the accelerator, real or virtual, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def independent(dataset: Any) -> Any | None:
    """A copy of ``dataset`` with a state of its own, to be read in this process; None if it cannot
    be copied.  Large tensors and arrays are shared with the original."""
    shared: list[Any] = []

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            tensor = isinstance(value, torch.Tensor) and value.nbytes > _LARGE
            if tensor or (isinstance(value, np.ndarray) and value.nbytes > _LARGE):
                shared.append(value)
                return len(shared) - 1
            return None

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return shared[number]

    stream = io.BytesIO()
    try:
        Pickler(stream).dump(getattr(dataset, "inner", dataset))
        stream.seek(0)
        return Unpickler(stream).load()
    except Exception:
        return None


def samples(batch: Any) -> int:
    """How many samples a batch holds: the length of the first tensor in it, else 1."""
    return next((int(t.shape[0]) for t in _tensors(batch) if t.dim()), 1)


def nbytes(batch: Any) -> int:
    """Bytes of all tensors of a batch."""
    return sum(tensor.nbytes for tensor in _tensors(batch))


_NONE = object()


def _steady(
    batches: Any, batch: Any, step: Step | None, setting: Setting, seconds: float
) -> tuple[int, float, float, Any]:
    """Go on until ``seconds`` are over; (batches, seconds, of these waiting, last batch)."""
    group = max(1, setting.num_workers)
    count, waited, began, latest = -group, 0.0, time.perf_counter(), batch
    while True:
        if count == 0:
            synchronise()
            began, waited = time.perf_counter(), 0.0
        asked = time.perf_counter()
        if count > 0 and count % group == 0 and asked - began >= seconds:
            break
        if step is not None:
            step(latest)
        stepped = time.perf_counter()
        following = next(batches, _NONE)
        if following is _NONE:
            break
        latest = following
        waited += time.perf_counter() - stepped
        count += 1
    synchronise()
    spent = time.perf_counter() - began
    return (count if count > 0 else count + group + 1), spent, waited, latest


def _measured(
    setting: Setting, made: list[Envelope], counted: int, spent: float, waited: float, start: float
) -> Measured:
    def mean(values: list[int]) -> float:
        return sum(values) / len(values) * 1e-9

    return Measured(
        setting, counted, spent / counted, waited / counted,
        load_s=mean([m.ended_ns - m.started_ns for m in made]),
        load_cpu_s=mean([m.cpu_ns for m in made]),
        queued_s=mean([m.queued_ns for m in made]),
        collate_s=mean([m.collate_ns for m in made]), start_s=start,
    )  # fmt: skip


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
