"""DDP's buckets against PyTorch's own assignment, and a regrouped step against a recorded one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labutils.models import spec
from labutils.timing import bench, ddp
from labutils.timing.bench import record
from labutils.timing.play import steps
from labutils.timing.recording import Setting
from labutils.virtual.record import NATIVE, Collective, Entry

MIB = 1 << 20


def tensors(seed: int, kinds: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    chance = random.Random(seed)
    return [
        torch.empty(chance.choice((1, 100, 4000, 90_000)), dtype=chance.choice(kinds))
        for _ in range(chance.randrange(1, 60))
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limits", [(1,), (20_000, 300_000), (1 << 20,), (400_000, 1)])
def test_the_assignment_is_that_of_pytorch(seed: int, limits: tuple[int, ...]) -> None:
    given = tensors(seed, (torch.float32, torch.float16))
    theirs, _ = dist._compute_bucket_assignment_by_size(given, list(limits), [False] * len(given))
    assert sorted(ddp.assign(given, limits), key=min) == theirs


def test_a_bucket_closes_when_its_limit_is_reached() -> None:
    """Ten of 1 MiB, the first bucket 1 MiB and the others 3: 1 + 3 + 3 + 3."""
    given = [torch.empty(MIB, dtype=torch.uint8) for _ in range(10)]
    assert ddp.buckets(given, 3, 1) == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_without_rebuilding_the_first_bucket_is_reduced_last() -> None:
    """Filled in the order of the parameters (1 + 3 + 3 + 3), reduced from the end."""
    given = [torch.empty(MIB, dtype=torch.uint8) for _ in range(10)]
    found = ddp.buckets(given, 3, 1, rebuilt=False)
    assert list(map(sorted, found)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_the_broadcast_of_buffers_is_issued_by_cpp() -> None:
    """DDP copies the buffers in one call of C++; all else in forward comes from Python."""
    entries = record(spec("resnet_small"), Setting(strategy="ddp", batch=4)).last
    forward = [e for e in entries if e.what == "kernel" and e.phase == "forward"]
    native = {e.kernel.name for e in forward if e.kernel and e.ref == NATIVE}
    python = {e.kernel.name for e in forward if e.kernel and e.ref != NATIVE}
    assert native == {"view", "cat", "slice", "copy_"}
    assert "convolution" in python and "copy_" not in python


def plain(entries: list[Entry]) -> list[tuple[Any, ...]]:
    """What happens where, without the numbers of events and collectives."""
    found = []
    for entry in entries:
        ref = entry.ref
        if isinstance(ref, Collective):
            ref = ref.op
        elif entry.what in ("record", "wait"):
            ref = None
        kernel: Any = entry.kernel
        if kernel is not None and kernel.kind == "view":  # costs the same, whatever it looks at
            kernel = kernel.name
        found.append((entry.what, entry.thread, entry.stream, entry.phase, kernel, ref))
    return found


@pytest.mark.parametrize("options", [
    {}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"accumulates": True},
])  # fmt: skip
@pytest.mark.parametrize("cap", [0.05, 0.2, 100])
def test_a_regrouped_step_is_one_recorded_with_these_buckets(
    options: dict[str, Any], cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP itself has a first bucket of the same size where it is passed a size."""
    setting = Setting(strategy="ddp", batch=4, **options)
    single = record(spec("resnet_small"), setting)
    rebuilt = "find_unused_parameters" not in options
    made = steps(single, 3 if "accumulates" in options else 1,
                 ddp.buckets(single.gradients, cap, cap, rebuilt))  # fmt: skip

    def wrap(module: Any, **given: Any) -> Any:
        return DistributedDataParallel(module, **{**given, "bucket_cap_mb": cap})

    monkeypatch.setattr(bench.nn.parallel, "DistributedDataParallel", wrap)
    theirs = record(spec("resnet_small"), setting)
    assert plain(made) == plain([e for part in (*theirs.micro, theirs.last) for e in part])
