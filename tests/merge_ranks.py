"""What the ranks of test_merge.py do: real DistributedDataParallel, recorded in every process."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labutils.models import ModelSpec, from_module, spec
from labutils.virtual.record import Graph

STEPS = 3


def narrow() -> ModelSpec:
    """A module with gradients of very different sizes, and a batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 36, 700), nn.ReLU(), nn.Linear(700, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip
    example = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    return from_module(model, example, optimizer=lambda p: torch.optim.AdamW(p, 1e-3))


CASES: dict[str, dict[str, Any]] = {
    "resnet18": {"model": lambda: spec("resnet18"), "batch": 2},
    "mlp_views": {"model": lambda: spec("mlp"), "batch": 16, "gradient_as_bucket_view": True},
    "narrow": {"model": narrow, "batch": 32, "bucket_cap_mb": 0.5, "first_bucket_mb": 0.5},
    "narrow_passes": {"model": narrow, "batch": 4, "accumulate": 4},
    "narrow_unused": {"model": narrow, "batch": 4, "find_unused_parameters": True},
}
"""Arguments of ``predict`` and of the run that it is compared with."""


def run_all(rank: int, world: int, store: str, out: str) -> None:
    """Run every case; write {case: (graph of one step, peak bytes, buckets)} to ``out``."""
    from labutils import virtual

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found = {name: _run(rank, world, virtual, **case) for name, case in CASES.items()}
    Path(out, f"{rank}.pkl").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _run(
    rank: int, world: int, virtual: Any, model: Callable[[], ModelSpec], batch: int,
    bucket_cap_mb: float | None = None, first_bucket_mb: float | None = None,
    accumulate: int = 1, **options: Any,
) -> tuple[Graph, int, list[int]]:  # fmt: skip
    import gc

    from labutils.virtual import journal
    from labutils.virtual.state import state

    gc.collect()
    virtual.enable(world, compute="phantom")
    device = f"vgpu:{rank}"
    torch.vgpu.reset_peak_memory_stats(rank)  # type: ignore[attr-defined]
    base = torch.vgpu.memory_allocated(rank)  # type: ignore[attr-defined]
    chosen = model()
    module = chosen.build().to(device)
    ddp = DistributedDataParallel(module, device_ids=[rank], bucket_cap_mb=bucket_cap_mb, **options)
    optimizer = chosen.optimizer(module.parameters())
    host = [chosen.batch(batch) for _ in range(1)]
    pinned = [(tuple(t.pin_memory() for t in x), y.pin_memory()) for x, y in host]
    mark, allocated = 0, 0
    for _ in range(STEPS):
        journal.sample_memory(rank)
        mark, allocated = state.recorder.count, state.ledger.allocated[rank]
        optimizer.zero_grad()
        for n in range(accumulate):
            inputs, targets = pinned[0]
            inputs = tuple(t.to(device, non_blocking=True) for t in inputs)
            targets = targets.to(device, non_blocking=True)
            with nullcontext() if n == accumulate - 1 else ddp.no_sync():
                chosen.loss(ddp, inputs, targets).backward()
        optimizer.step()
    journal.sample_memory(rank)
    state.recorder.host()
    entries, dropped = state.recorder.since(mark)
    peak = torch.vgpu.max_memory_allocated(rank) - base  # type: ignore[attr-defined]
    held = [0] * world
    held[rank] = allocated - base
    buckets = [
        e.kernel.bytes_read for e in entries
        if e.what == "collective" and e.kernel and e.ref.op == "all_reduce"
        and e.kernel.dtype == "float32"
    ]  # fmt: skip
    return Graph(entries, mark, world, tuple(held), (), "", dropped), peak, buckets
