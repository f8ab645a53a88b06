"""What this machine is: GPUs, and the cores and memory that this process may really use.

A container or a batch job often sees 128 cores and may use two of them.  Cores here are those left
by the scheduler affinity *and* by the cgroup's CPU quota; memory is the smaller of the physical
memory and the cgroup's limit.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device that PyTorch sees."""

    name: str
    memory_bytes: int
    multi_processors: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about this machine that do not change from one run to the next."""

    system: str
    """Operating system and processor, e.g. ``Linux x86_64``."""
    python: str
    torch: str
    gpus: tuple[Gpu, ...]
    cores: int
    """Cores that this process may keep busy (affinity and cgroup quota)."""
    cores_present: int
    """Cores in the machine."""
    memory_bytes: int
    """Memory that this process may use (cgroup limit or physical)."""
    shared_memory_bytes: int | None
    """Size of ``/dev/shm``; None where the system has none."""

    @property
    def backend(self) -> str:
        """The process group backend for one rank per GPU: ``nccl``, without GPUs ``gloo``."""
        return "nccl" if self.gpus and self.system.startswith("Linux") else "gloo"

    def summary(self) -> str:
        """A few lines for the reader; no host name, no time, nothing that changes between runs."""
        shm = self.shared_memory_bytes
        rows = [
            ("system", f"{self.system}, Python {self.python}, PyTorch {self.torch}"),
            ("GPUs", _gpus_text(self.gpus)),
            ("cores", _cores_text(self.cores, self.cores_present)),
            ("memory", f"{self.memory_bytes / _GIB:.1f} GiB"),
            ("/dev/shm", "none on this system" if shm is None else f"{shm / _GIB:.2f} GiB"),
        ]
        return "\n".join(f"{label:<9} {text}" for label, text in rows)


def describe() -> Machine:
    """This machine, as this process sees it.  Initialises CUDA where there is a GPU."""
    import torch

    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        gpus=gpus(),
        cores=usable_cores(),
        cores_present=os.cpu_count() or 1,
        memory_bytes=memory_limit(),
        shared_memory_bytes=shared_memory(),
    )


def gpus() -> tuple[Gpu, ...]:
    """The CUDA devices that PyTorch sees (``CUDA_VISIBLE_DEVICES`` counts), in its order."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Gpu(p.name, p.total_memory, p.multi_processor_count) for p in found)


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy: affinity, cut down to the cgroup's CPU quota.

    A quota of 2.5 cores counts as 2, since a third busy process would be throttled; never below 1.
    ``root`` is where ``/proc`` and ``/sys`` are looked for (tests lay a small tree of their own).
    """
    quotas = [int(quota) for quota in _cpu_quotas(root)]
    return max(1, min([_affinity(), *quotas]))


def memory_limit(root: Path = _ROOT) -> int:
    """Bytes of memory that this process may use: the cgroup's limit, or what the machine has."""
    return min([_physical_memory(), *_memory_limits(root)])


def shared_memory(path: str = "/dev/shm", free: bool = False) -> int | None:
    """Bytes that DataLoader workers can pass tensors through; None where there is no such place.

    With ``free``, what of it is not in use.
    """
    try:
        stat = os.statvfs(path)
    except (AttributeError, OSError):  # Windows has no statvfs, macOS no /dev/shm
        return None
    return (stat.f_bavail if free else stat.f_blocks) * stat.f_frsize


def worker_budget(ranks: int = 1, cores: int | None = None) -> int:
    """How many DataLoader workers each of ``ranks`` processes on this machine can have.

    One core per rank is its own; what is left is shared out evenly.  Zero means: load in the rank.
    """
    if ranks < 1:
        raise ValueError(f"worker_budget needs at least one rank, not {ranks}.")
    share = (usable_cores() if cores is None else cores) // ranks
    return max(0, share - 1)


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def _physical_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores allowed by each cgroup around this process that sets a quota."""
    for folder in _cgroups(root, "cpu"):
        v2 = _read(folder / "cpu.max").split()
        v1 = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        quota, period = v2 if len(v2) == 2 else v1
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1: no quota
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and 0 < int(text) < _UNLIMITED:
                yield int(text)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroups for a controller, each with its ancestors.

    A line of ``/proc/self/cgroup`` reads ``id:controllers:path``; version 2 names no controllers.
    Inside a container the path may be the host's, so the mount's own top is always looked at.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = mount / path.lstrip("/")
        while folder != mount and mount in folder.parents:
            yield folder
            folder = folder.parent
        yield mount


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gpus_text(found: tuple[Gpu, ...]) -> str:
    if not found:
        return "none: virtual GPUs take their place"
    kinds = list(dict.fromkeys(found))
    counts = [(found.count(gpu), gpu) for gpu in kinds]
    return ", ".join(f"{n} x {gpu.name} ({gpu.memory_bytes / _GIB:.0f} GiB)" for n, gpu in counts)


def _cores_text(usable: int, present: int) -> str:
    return f"{usable}" if usable >= present else f"{usable} usable of {present}"
