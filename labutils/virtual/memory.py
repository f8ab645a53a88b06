"""The ledger: how many bytes each virtual GPU holds, and the error when it would hold too many."""

from __future__ import annotations

import threading

import torch

GIB = 1 << 30
MIB = 1 << 20
SEGMENT = 2 * MIB
"""Reserved memory grows in steps of this size, as CUDA's caching allocator takes small segments."""


class Ledger:
    """Allocated, peak and reserved bytes of each device.

    Allocated bytes are exact: the sum of the sizes of the live storages, without the rounding to
    512-byte blocks of CUDA's allocator.  Reserved bytes are what a caching allocator would keep:
    the highest level so far, until ``empty_cache``.
    """

    def __init__(self, devices: int = 0, capacity: int = 0) -> None:
        # Re-entrant: the garbage collector may free a block while this thread holds the lock.
        self.lock = threading.RLock()
        self.closed = ""
        """Why nothing can be allocated in this process; "" if it can."""
        self.allocated: list[int] = []
        self.peak: list[int] = []
        self.reserved: list[int] = []
        self.reserved_peak: list[int] = []
        self.total_allocated: list[int] = []
        self.allocations: list[int] = []
        self.frees: list[int] = []
        self.out_of_memory: list[int] = []
        self.capacity: list[int] = []
        self.resize(devices, capacity)

    def resize(self, devices: int, capacity: int) -> None:
        """Have at least ``devices`` devices of ``capacity`` bytes; live bytes stay counted."""
        with self.lock:
            self.capacity[:] = [capacity] * max(devices, len(self.allocated))
            columns = (
                self.allocated,
                self.peak,
                self.reserved,
                self.reserved_peak,
                self.total_allocated,
                self.allocations,
                self.frees,
                self.out_of_memory,
            )
            for column in columns:
                column.extend([0] * (devices - len(column)))

    def allocate(self, device: int, nbytes: int) -> None:
        """Count ``nbytes`` more on ``device``.

        Raises:
            torch.OutOfMemoryError: the device's capacity does not hold them; nothing is counted.
        """
        with self.lock:
            now = self.allocated[device] + nbytes
            if now > self.capacity[device] or self.closed:
                self.check(device, nbytes)
            self.allocated[device] = now
            self.total_allocated[device] += nbytes
            self.allocations[device] += 1
            if now > self.peak[device]:
                self.peak[device] = now
            if now > self.reserved[device]:
                self._reserve(device, now)

    def check(self, device: int, nbytes: int) -> int:
        """The allocated bytes that ``device`` would have with ``nbytes`` more.

        Raises:
            torch.OutOfMemoryError: that is more than it has.
        """
        if self.closed:
            raise RuntimeError(self.closed)
        now = self.allocated[device] + nbytes
        if now > self.capacity[device]:
            self.out_of_memory[device] += 1
            raise torch.OutOfMemoryError(self._message(device, nbytes))
        return now

    def free(self, device: int, nbytes: int) -> None:
        """Count ``nbytes`` fewer on ``device``."""
        with self.lock:
            self.allocated[device] -= nbytes
            self.frees[device] += 1

    def reset_peak(self, device: int) -> None:
        """Start the peaks of ``device`` again from what is there now."""
        with self.lock:
            self.peak[device] = self.allocated[device]
            self.reserved_peak[device] = self.reserved[device]

    def empty_cache(self) -> None:
        """Give back what is reserved but not allocated, on every device."""
        with self.lock:
            for device, allocated in enumerate(self.allocated):
                self.reserved[device] = _round_up(allocated)

    def _reserve(self, device: int, nbytes: int) -> None:
        self.reserved[device] = min(_round_up(nbytes), self.capacity[device])
        self.reserved_peak[device] = max(self.reserved_peak[device], self.reserved[device])

    def _message(self, device: int, nbytes: int) -> str:
        allocated, capacity = self.allocated[device], self.capacity[device]
        return (
            f"vgpu out of memory. Tried to allocate {size(nbytes)}. GPU {device} has a total "
            f"capacity of {size(capacity)} of which {size(capacity - allocated)} is free; "
            f"{size(allocated)} is allocated. Make the batch smaller, free tensors you no longer "
            "need, or split the work over more GPUs."
        )


class Block:
    """One storage on a device: counted when made, uncounted when the last tensor on it is gone."""

    __slots__ = ("__weakref__", "device", "event", "ledger", "nbytes", "writer")

    def __init__(self, ledger: Ledger, device: int, nbytes: int) -> None:
        # ``nbytes`` is set last: __del__ of a block that could not be allocated frees nothing.
        self.nbytes = 0
        self.ledger = ledger
        self.device = device
        self.writer: tuple[str, int] | None = None
        """Host thread and log number of the operation that last wrote it, during backward."""
        self.event = 0
        """Event behind the collective that still owns it, or 0."""
        ledger.allocate(device, nbytes)
        self.nbytes = nbytes

    def resize(self, nbytes: int) -> None:
        """Grow to ``nbytes`` (a storage never shrinks)."""
        if nbytes > self.nbytes:
            self.ledger.allocate(self.device, nbytes - self.nbytes)
            self.nbytes = nbytes

    def __del__(self) -> None:
        if self.nbytes:
            self.ledger.free(self.device, self.nbytes)


def size(nbytes: int) -> str:
    """``nbytes`` in the unit that CUDA's messages would use."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if nbytes >= MIB:
        return f"{nbytes / MIB:.2f} MiB"
    return f"{nbytes / 1024:.2f} KiB"


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SEGMENT) * SEGMENT
