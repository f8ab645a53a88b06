"""The ledger: how many bytes each virtual GPU holds, and the error when it would hold too many."""

from __future__ import annotations

import threading
import weakref
from collections import deque

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

    What is alive is known from weak references, which Python keeps without running any code of
    ours: so an interrupt (Ctrl-C) in the middle of something leaves no byte counted for ever.
    """

    def __init__(self, devices: int = 0, capacity: int = 0) -> None:
        # Re-entrant: the garbage collector may run while this thread holds the lock.
        self.lock = threading.RLock()
        self.closed = ""
        """Why nothing can be allocated in this process; "" if it can."""
        self._live: set[_Live] = set()
        self._dead: deque[_Live] = deque()
        """Blocks that are gone and still counted."""
        self._unsure = False
        """The sums are being changed; or they were, when an interrupt came."""
        self._allocated: list[int] = []
        self._frees: list[int] = []
        self.peak: list[int] = []
        self.reserved: list[int] = []
        self.reserved_peak: list[int] = []
        self.total_allocated: list[int] = []
        self.allocations: list[int] = []
        self.out_of_memory: list[int] = []
        self.capacity: list[int] = []
        self.resize(devices, capacity)

    @property
    def allocated(self) -> list[int]:
        """Bytes that live storages occupy on each device."""
        if self._dead or self._unsure:
            self._settle()
        return self._allocated

    @property
    def frees(self) -> list[int]:
        """How many storages were freed on each device."""
        self._settle()
        return self._frees

    def resize(self, devices: int, capacity: int) -> None:
        """Have at least ``devices`` devices of ``capacity`` bytes; live bytes stay counted."""
        with self.lock:
            self.capacity[:] = [capacity] * max(devices, len(self._allocated))
            columns = (
                self._allocated,
                self._frees,
                self.peak,
                self.reserved,
                self.reserved_peak,
                self.total_allocated,
                self.allocations,
                self.out_of_memory,
            )
            for column in columns:
                column.extend([0] * (devices - len(column)))

    def allocate(self, block: Block, nbytes: int) -> None:
        """Count ``nbytes`` for ``block`` (more, if it has some), for as long as it lives.

        Raises:
            torch.OutOfMemoryError: the device's capacity does not hold them; nothing is counted.
        """
        device = block.device
        with self.lock:
            if self._dead or self._unsure:
                self._settle()
            now = self._allocated[device] + nbytes
            if now > self.capacity[device] or self.closed:
                self.check(device, nbytes)
            self._unsure = True
            if block.live is None:
                live = block.live = _Live(block, self._dead.append)
                live.device, live.nbytes = device, nbytes
                self._live.add(live)
                self.allocations[device] += 1
            else:
                block.live.nbytes += nbytes
            self._allocated[device] = now
            self.total_allocated[device] += nbytes
            if now > self.peak[device]:
                self.peak[device] = now
            if now > self.reserved[device]:
                self._reserve(device, now)
            self._unsure = False

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

    def _settle(self) -> None:
        """Take the dead out of the sums; after an interrupt, add up anew."""
        with self.lock:
            if self._unsure:
                self._recount()
            self._unsure = True
            while self._dead:
                gone = self._dead.popleft()
                if gone in self._live:
                    self._live.remove(gone)
                    self._allocated[gone.device] -= gone.nbytes
                    self._frees[gone.device] += 1
            self._unsure = False

    def _recount(self) -> None:
        self._live = {live for live in self._live if live() is not None}
        for device in range(len(self._allocated)):
            here = [live.nbytes for live in self._live if live.device == device]
            self._allocated[device] = sum(here)
            self._frees[device] = self.allocations[device] - len(here)

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


class _Live(weakref.ref["Block"]):
    """A block that counts, until it is gone."""

    __slots__ = ("device", "nbytes")
    device: int
    nbytes: int


class Block:
    """One storage on a device: counted when made, uncounted when the last tensor on it is gone."""

    __slots__ = ("__weakref__", "device", "event", "ledger", "live", "writer")

    def __init__(self, ledger: Ledger, device: int, nbytes: int) -> None:
        self.ledger = ledger
        self.device = device
        self.writer: tuple[str, int] | None = None
        """Host thread and log number of the operation that last wrote it, during backward."""
        self.event = 0
        """Event behind the collective that still owns it, or 0."""
        self.live: _Live | None = None
        ledger.allocate(self, nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the storage in bytes."""
        return self.live.nbytes if self.live else 0

    def resize(self, nbytes: int) -> None:
        """Grow to ``nbytes`` (a storage never shrinks)."""
        if nbytes > self.nbytes:
            self.ledger.allocate(self, nbytes - self.nbytes)


def size(nbytes: int) -> str:
    """``nbytes`` in the unit that CUDA's messages would use."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if nbytes >= MIB:
        return f"{nbytes / MIB:.2f} MiB"
    return f"{nbytes / 1024:.2f} KiB"


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SEGMENT) * SEGMENT
