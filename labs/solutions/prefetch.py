"""Batches that are loaded, pinned and copied by a thread of their own while the GPU computes."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

lab = "01"


def prefetch(loader: Any, device: torch.device, depth: int = 2) -> Iterator[Any]:
    gpu = torch.get_device_module(device)
    copying = gpu.Stream(device)
    ready: queue.Queue[Any] = queue.Queue(depth)
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
                pinned = [tensor.pin_memory() for tensor in batch]
                with gpu.stream(copying):
                    there = [tensor.to(device, non_blocking=True) for tensor in pinned]
                    put((there, copying.record_event()))
            put(None)
        except Exception as error:
            put(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            batch, copied = item
            computing = gpu.current_stream(device)
            computing.wait_event(copied)
            for tensor in batch:
                tensor.record_stream(computing)  # its memory is not free before the work is done
            yield batch
    finally:
        stop.set()
        thread.join()


class Slow:
    """A loader whose batch ``k`` has ``k + 1`` samples; it counts what it is asked for."""

    def __init__(self, batches: int, fails_at: int) -> None:
        self.batches, self.fails_at, self.asked = batches, fails_at, 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for k in range(self.batches):
            self.asked = k + 1
            time.sleep(0.002)
            if k == self.fails_at:
                raise OSError("the disk is gone")
            yield [torch.full((k + 1, 3), float(k)), torch.arange(k + 1)]


def run(
    answer: Callable[..., Any], batches: int, depth: int, stop_after: int, fails_at: int
) -> dict[str, Any]:
    """What comes out of the loader, and what the GPU was asked to do for it."""
    from labutils.devices import in_use

    (device,) = in_use(1)
    before, copies = set(threading.enumerate()), _Copies(device)
    loader, found = Slow(batches, fails_at), {"batches": [], "device": set(), "error": None}
    asked_ahead = 0
    try:
        passing = answer(loader, device, depth)
        for number, batch in enumerate(passing, 1):
            found["batches"].append([tuple(tensor.shape) for tensor in batch])
            found["device"] |= {str(tensor.device) for tensor in batch}
            _until(lambda: loader.asked > min(number, batches - 1))  # noqa: B023 - called at once
            time.sleep(0.02)
            asked_ahead = max(asked_ahead, loader.asked - number)
            if number == stop_after:
                break
        getattr(passing, "close", lambda: None)()
    except OSError as error:
        found["error"] = str(error)
    _until(lambda: not set(threading.enumerate()) - before)
    left = set(threading.enumerate()) - before
    return {
        **found,
        "threads left running": len(left),
        "loads ahead": asked_ahead >= min(1, batches - 1),
        "loads at most depth + 2 ahead": asked_ahead <= depth + 2,
        **copies.seen(),
    }


def _until(condition: Callable[[], bool], seconds: float = 0.3) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)


class _Copies:
    """How a virtual GPU was asked to copy; nothing is known of a real one."""

    def __init__(self, device: torch.device) -> None:
        from labutils.virtual.state import state

        self.recorder = state.recorder if device.type == "vgpu" else None
        self.first = state.recorder.count

    def seen(self) -> dict[str, bool]:
        if self.recorder is None:
            return {}
        entries, _ = self.recorder.since(self.first)
        copies = [e for e in entries if e.what == "copy" and e.ref.source < 0]
        streams = {e.stream for e in copies}
        waits = any(e.what in ("wait", "sync") for e in entries)
        return {
            "copies from pinned memory": all(e.ref.pinned for e in copies),
            "copies without blocking": all(not e.ref.blocking for e in copies),
            "copies on a stream of their own": 0 not in streams,
            "waits for the copies": waits,
        }


def cases(rng: random.Random) -> Iterator[tuple[int, int, int, int]]:
    yield from [(1, 1, 0, -1), (4, 1, 0, -1), (8, 2, 0, -1), (9, 2, 2, -1), (5, 2, 0, 2)]
    yield rng.randint(3, 6), rng.randint(1, 3), 0, -1


hints = [
    "Three parts: a thread that fills a queue.Queue(depth), the loop that empties it and yields, "
    "and a try/finally around that loop, which also runs when the consumer breaks out.",
    "The thread: tensor.pin_memory(), then under `with gpu.stream(copying)` "
    ".to(device, non_blocking=True), then copying.record_event() into the queue with the batch.",
    "The loop: gpu.current_stream().wait_event(event) before the batch is yielded, so that "
    "computing on it comes after the copy.",
    "An end: put None when the loader is through, and the exception itself if there is one; the "
    "loop ends at None and raises an exception.",
    "A thread that waits in put() for a consumer that left waits for ever: put with a timeout, "
    "and look at a threading.Event that `finally` sets.",
]
