"""Limits are read from small trees laid out as the kernel lays out /proc and /sys."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labutils import hardware
from labutils.hardware import Gpu, Machine

GIB = 1 << 30


@pytest.fixture
def big_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_affinity", lambda: 64)
    monkeypatch.setattr(hardware, "_physical_memory", lambda: 256 * GIB)


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2_POD = {
    "proc/self/cgroup": "0::/kubepods/pod1/main",
    "sys/fs/cgroup/kubepods/pod1/main/cpu.max": "max 100000",
    "sys/fs/cgroup/kubepods/pod1/main/memory.max": "max",
    "sys/fs/cgroup/kubepods/pod1/cpu.max": "350000 100000",
    "sys/fs/cgroup/kubepods/pod1/memory.max": str(4 * GIB),
}
V1_DOCKER = {  # the path is the host's: only the top of the mount is there
    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/abc",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
}
V1_FREE = {
    "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}
HALF_A_CORE = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}


@pytest.mark.usefixtures("big_machine")
@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        (V2_POD, 3, 4 * GIB),
        (V1_DOCKER, 2, 2 * GIB),
        (V1_FREE, 64, 256 * GIB),
        (HALF_A_CORE, 1, 256 * GIB),
        ({}, 64, 256 * GIB),
        ({"proc/self/cgroup": "nonsense"}, 64, 256 * GIB),
    ],
    ids=["v2 pod", "v1 docker", "v1 free", "half a core", "no cgroup", "unreadable"],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], cores: int, memory: int) -> None:
    root = lay(tmp_path, files)
    assert hardware.usable_cores(root) == cores
    assert hardware.memory_limit(root) == memory


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_counts() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from labutils.hardware import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_systems_without_affinity_or_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert hardware._affinity() == os.cpu_count()
    assert hardware.shared_memory("/no/such/place") is None
    monkeypatch.delattr(os, "statvfs", raising=False)
    assert hardware.shared_memory() is None


def test_shared_memory_is_what_df_says(tmp_path: Path) -> None:
    done = subprocess.run(["df", "-Pk", tmp_path], capture_output=True, text=True, check=True)
    kibibytes = int(done.stdout.splitlines()[1].split()[1])
    assert hardware.shared_memory(str(tmp_path)) == pytest.approx(kibibytes * 1024, rel=0.1)


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(1, 1, 0), (2, 1, 1), (2, 4, 0), (12, 4, 2), (64, 8, 7)]
)
def test_worker_budget(cores: int, ranks: int, workers: int) -> None:
    assert hardware.worker_budget(ranks, cores=cores) == workers
    assert ranks * (workers + 1) <= max(cores, ranks)


def test_worker_budget_refuses_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        hardware.worker_budget(0)


LAPTOP = Machine("Linux x86_64", "3.11.7", "2.13.0", (), 2, 8, 4 * GIB, GIB // 16)


def test_summary() -> None:
    assert LAPTOP.summary() == (
        "system    Linux x86_64, Python 3.11.7, PyTorch 2.13.0\n"
        "GPUs      none: virtual GPUs take their place\n"
        "cores     2 usable of 8\n"
        "memory    4.0 GiB\n"
        "/dev/shm  0.06 GiB"
    )
    a100 = Gpu("A100", 80 * GIB, 108)
    node = replace(LAPTOP, gpus=(a100,) * 8, cores=8, shared_memory_bytes=None)
    assert "8 x A100 (80 GiB)" in node.summary()
    assert "cores     8\n" in node.summary()
    assert "none on this system" in node.summary()


def test_backend() -> None:
    gpu = Gpu("T4", 16 * GIB, 40)
    assert LAPTOP.backend == "gloo"
    assert replace(LAPTOP, gpus=(gpu,)).backend == "nccl"
    assert replace(LAPTOP, gpus=(gpu,), system="Windows AMD64").backend == "gloo"


def test_describe_this_machine() -> None:
    machine = hardware.describe()
    assert 1 <= machine.cores <= machine.cores_present
    assert machine.memory_bytes > GIB // 4
    assert machine.summary() == hardware.describe().summary()


def test_gpus_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import torch

    properties = SimpleNamespace(name="T4", total_memory=15 * GIB, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert hardware.gpus() == (Gpu("T4", 15 * GIB, 40),) * 2
