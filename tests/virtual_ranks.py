"""What the ranks of the distributed tests do; each function runs in every process."""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils._pytree import tree_map

RUNS: dict[str, dict[str, Callable[[int, int], Any]]] = {"real": {}, "phantom": {}}


def run_all(rank: int, world: int, compute: str, store: str, out: str) -> None:
    """Run every function of one kind, and write what they return (or their error) to ``out``."""
    from labutils import virtual

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    virtual.enable(world, compute=compute)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for name, function in RUNS[compute].items():
        try:
            results[name] = _to_cpu(function(rank, world))
        except Exception:
            results[name] = "ERROR " + traceback.format_exc()
    torch.save(results, Path(out) / f"{compute}{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _to_cpu(value: Any) -> Any:
    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        where = str(leaf.device)
        return (where, tuple(leaf.shape) if leaf.raw.is_meta else leaf.detach().cpu())  # type: ignore[attr-defined]

    return tree_map(plain, value)


def on(*kinds: str) -> Callable[[Callable[[int, int], Any]], Callable[[int, int], Any]]:
    def add(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        for kind in kinds:
            RUNS[kind][function.__name__] = function
        return function

    return add


def mine(rank: int, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(rank + 1), device=f"vgpu:{rank}")


def empty(rank: int, size: int = 4) -> torch.Tensor:
    return torch.zeros(size, device=f"vgpu:{rank}")


@on("real", "phantom")
def all_reduce(rank: int, world: int) -> Any:
    x = mine(rank)
    dist.all_reduce(x)
    return x


@on("real", "phantom")
def all_reduce_max_async(rank: int, world: int) -> Any:
    x = mine(rank)
    work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    return x


@on("real", "phantom")
def future_of_all_reduce(rank: int, world: int) -> Any:
    x = mine(rank)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0] * 2).wait()


@on("real", "phantom")
def broadcast(rank: int, world: int) -> Any:
    x = mine(rank)
    dist.broadcast(x, 1)
    return x


@on("real", "phantom")
def reduce(rank: int, world: int) -> Any:
    x = mine(rank)
    dist.reduce(x, 0)
    return x if rank == 0 else None


@on("real", "phantom")
def all_gather(rank: int, world: int) -> Any:
    parts = [empty(rank) for _ in range(world)]
    dist.all_gather(parts, mine(rank))
    return parts


@on("real", "phantom")
def all_gather_into_tensor(rank: int, world: int) -> Any:
    out = empty(rank, 2 * world)
    dist.all_gather_into_tensor(out, mine(rank, 2))
    return out


@on("real", "phantom")
def reduce_scatter(rank: int, world: int) -> Any:
    out = empty(rank)
    dist.reduce_scatter(out, [mine(rank) * (i + 1) for i in range(world)])
    return out


@on("real", "phantom")
def reduce_scatter_tensor(rank: int, world: int) -> Any:
    out = empty(rank, 2)
    dist.reduce_scatter_tensor(out, mine(rank, 2 * world))
    return out


@on("real", "phantom")
def gather(rank: int, world: int) -> Any:
    parts = [empty(rank) for _ in range(world)] if rank == 0 else None
    dist.gather(mine(rank), parts, 0)
    return parts


@on("real", "phantom")
def scatter(rank: int, world: int) -> Any:
    out = empty(rank)
    parts = [mine(rank) * (i + 1) for i in range(world)] if rank == 0 else None
    dist.scatter(out, parts, 0)
    return out


@on("real", "phantom")
def all_to_all(rank: int, world: int) -> Any:
    parts = [empty(rank, 2) for _ in range(world)]
    dist.all_to_all(parts, [mine(rank, 2) + 10 * i for i in range(world)])
    return parts


@on("real", "phantom")
def all_to_all_single(rank: int, world: int) -> Any:
    out = empty(rank, world)
    dist.all_to_all_single(out, mine(rank, world))
    return out


@on("real", "phantom")
def all_to_all_uneven(rank: int, world: int) -> Any:
    sends = [1 + (rank + other) % 2 for other in range(world)]
    out = empty(rank, sum(sends))
    dist.all_to_all_single(out, mine(rank, sum(sends)), sends, sends)
    return out


@on("real", "phantom")
def send_and_receive(rank: int, world: int) -> Any:
    if rank == 0:
        dist.send(mine(rank), 1)
        return None
    out = empty(rank)
    if rank == 1:
        dist.recv(out, 0)
    return out


@on("real", "phantom")
def batch_isend_irecv(rank: int, world: int) -> Any:
    out = empty(rank)
    operations = [
        dist.P2POp(dist.isend, mine(rank), (rank + 1) % world),
        dist.P2POp(dist.irecv, out, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return out


@on("real", "phantom")
def barrier_and_objects(rank: int, world: int) -> Any:
    dist.barrier()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    return objects


@on("real")
def subgroup(rank: int, world: int) -> Any:
    group = dist.new_group([0, 1])
    x = mine(rank)
    if rank < 2:
        dist.all_reduce(x, group=group)
    return x


# ------------------------------------------------------------------------- DistributedDataParallel


def small(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)] if norm else [nn.Conv2d(3, 4, 3)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def data(world: int, steps: int = 2, per_rank: int = 2) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(steps, world * per_rank, 3, 8, 8)


def train(rank: int, world: int, prepare: Any = None, **options: Any) -> Any:
    model = DDP(small().to(f"vgpu:{rank}"), device_ids=[rank], **options)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in data(world):
        optimizer.zero_grad()
        model(batch[2 * rank : 2 * rank + 2].to(f"vgpu:{rank}")).pow(2).mean().backward()
        optimizer.step()
    return list(model.parameters())


def _hook(name: str) -> Callable[[DDP], None]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return lambda model: model.register_comm_hook(None, getattr(default_hooks, name))


def _own_hook(model: DDP) -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)


def _power(model: DDP) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "tiny_buckets": {"bucket_cap_mb": 0.0001},
    "own_hook": {"prepare": _own_hook},
    "allreduce_hook": {"prepare": _hook("allreduce_hook")},
    "fp16_hook": {"prepare": _hook("fp16_compress_hook")},
}
for _name, _options in VARIANTS.items():
    RUNS["real"][f"ddp_{_name}"] = functools.partial(train, **_options)


@on("real")
def copies_in_backward(rank: int, world: int) -> Any:
    """Names of the copies that DDP makes between host and device in a backward (none)."""
    from labutils.virtual.state import state

    model = DDP(small().to(f"vgpu:{rank}"), device_ids=[rank])
    loss = model(data(world)[0, :2].to(f"vgpu:{rank}")).pow(2).mean()
    mark = state.recorder.count
    loss.backward()
    return [e.kernel.name for e in state.recorder.since(mark)[0] if e.what == "copy" and e.kernel]


@on("real")
def no_sync(rank: int, world: int) -> Any:
    model = DDP(small().to(f"vgpu:{rank}"), device_ids=[rank])
    batches = data(world)[:, 2 * rank : 2 * rank + 2].to(f"vgpu:{rank}")
    with model.no_sync():
        model(batches[0]).pow(2).mean().backward()
    model(batches[1]).pow(2).mean().backward()
    return [p.grad for p in model.parameters()]


@on("real")
def zero_optimizer(rank: int, world: int) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(small().to(f"vgpu:{rank}"), device_ids=[rank])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for batch in data(world):
        optimizer.zero_grad()
        model(batch[2 * rank : 2 * rank + 2].to(f"vgpu:{rank}")).pow(2).mean().backward()
        optimizer.step()
    return list(model.parameters())


@on("real")
def uneven_join(rank: int, world: int) -> Any:
    model = DDP(small().to(f"vgpu:{rank}"), device_ids=[rank])
    steps = 0
    with model.join():
        for batch in data(world, steps=1 + rank):
            model.zero_grad()
            model(batch[:2].to(f"vgpu:{rank}")).sum().backward()
            steps += 1
    return steps, [p.grad for p in model.parameters()]


@on("real")
def sync_batch_norm(rank: int, world: int) -> Any:
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(small(norm=True)).to(f"vgpu:{rank}")
    model = DDP(model, device_ids=[rank])
    x = data(world)[0, 2 * rank : 2 * rank + 2].to(f"vgpu:{rank}").requires_grad_()
    out = model(x)
    out.pow(2).sum().div(world).backward()
    norm = model.module[1]
    return out, x.grad, [p.grad for p in model.parameters()], norm.running_mean, norm.running_var


@on("real")
def uneven_sync_batch_norm(rank: int, world: int) -> Any:
    norm = nn.SyncBatchNorm(3).to(f"vgpu:{rank}")
    batches = data(world)[0].split([1, 2, world * 2 - 3])
    return norm(batches[rank].to(f"vgpu:{rank}"))


@on("phantom")
def resnet_step(rank: int, world: int) -> Any:
    from labutils import models
    from labutils.virtual.state import state

    device = f"vgpu:{rank}"
    model = DDP(models.create("resnet50").to(device), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(256, 3, 224, 224, device=device)
    y = torch.randint(0, 1000, (256,), device=device)
    mark = state.recorder.count
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    entries = [e for e in state.recorder.since(mark)[0] if e.what == "collective" and e.kernel]
    return [
        (e.ref.op, e.ref.devices, e.ref.group, e.ref.sequence, e.kernel.bytes_read)
        for e in entries
        if e.kernel
    ]


@on("phantom")
def phantom_hook(rank: int, world: int) -> Any:
    model = DDP(small().to(f"vgpu:{rank}"), device_ids=[rank])
    _hook("fp16_compress_hook")(model)
    model(empty(rank, 2 * 192).view(2, 3, 8, 8)).sum().backward()
    return [p.grad for p in model.parameters()]


@on("phantom")
def phantom_sync_batch_norm(rank: int, world: int) -> Any:
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(small(norm=True)).to(f"vgpu:{rank}")
    model = DDP(model, device_ids=[rank])
    out = model(empty(rank, 2 * 192).view(2, 3, 8, 8))
    out.sum().backward()
    return out, [p.grad for p in model.parameters()]
