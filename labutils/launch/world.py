"""How many ranks there are, what each of them gets, and whether this machine has room for them."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from labutils import hardware
from labutils.launch.processes import forking_is_safe

_MIB = 1 << 20
_FORKED_BYTES, _SPAWNED_BYTES, _GPU_BYTES = 64 * _MIB, 256 * _MIB, 1024 * _MIB


@dataclass
class World:
    """How many ranks there are and what each of them gets."""

    ranks: int
    """Ranks per node."""
    nodes: int = 1
    gpus: int = field(default_factory=torch.cuda.device_count)

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("nodes", self.nodes)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, not {value!r}.")
            if value < 1:
                raise ValueError(
                    f"{name}={value} would run nothing: choose at least 1 (without a GPU, "
                    "torch.cuda.device_count() is 0)."
                )
        if self.size > 64:
            raise ValueError(
                f"{self.size} ranks are more than one machine can teach with: use 64 at most."
            )

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.ranks * self.nodes

    @property
    def backend(self) -> str:
        """nccl when each rank has a GPU of its own, else gloo."""
        own = self.gpus >= self.size and sys.platform == "linux" and dist.is_nccl_available()
        return "nccl" if own else "gloo"

    @property
    def threads(self) -> int:
        """Threads that each rank computes with."""
        return max(1, hardware.usable_cores() // self.size)

    def about(self) -> str:
        """One line on what was chosen."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)} each"
        shared = (
            f" ({self.gpus} GPU{'s' * (self.gpus > 1)} shared)" if 0 < self.gpus < self.size else ""
        )
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.size} ranks{where}: {self.backend}{shared}, {threads}"

    def check_memory(self, free: int | None = None, each: int | None = None) -> None:
        """Raise ValueError when this machine has no room for the ranks."""
        each = each or _memory_each(self.gpus, self.nodes)
        free = free_memory() if free is None else free
        if self.size * each > free:
            raise ValueError(
                f"{self.size} ranks need about {self.size * each / 2**30:.1f} GiB of memory, but "
                f"only {free / 2**30:.1f} GiB are free here: use at most {free // each} ranks."
            )


def _memory_each(gpus: int, nodes: int) -> int:
    base = _FORKED_BYTES if nodes == 1 and forking_is_safe() else _SPAWNED_BYTES
    return base + (_GPU_BYTES if gpus else 0)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes can have: what the machine has free, within the cgroup's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = hardware.memory_limit(root)
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            used = int((root / "sys/fs/cgroup" / name).read_text())
            cache = _reclaimable(root / "sys/fs/cgroup" / name)
            free = min(free, limit - used + cache)
    return max(0, free)


def _reclaimable(usage: Path) -> int:
    """The page cache that counts as used, but that the system gives back when it is wanted."""
    with contextlib.suppress(OSError, ValueError):
        for line in (usage.parent / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
