"""What the ranks of the tests of the lab on DDP do.

A module of its own that imports little: each rank imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labutils as lab


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 6, generator=own), torch.randint(0, 4, (5,), generator=own)


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]


def passes(call: Callable[..., Any], module: nn.Module, finish: Any = None) -> list[torch.Tensor]:
    """In a rank: the gradients of three passes."""
    found = []
    for step in range(3):
        module.zero_grad()
        x, y = batch(dist.get_rank(), step)
        F.cross_entropy(call(x), y).backward()
        if finish is not None:
            finish(module)
        found.append(flat(module).clone())
    return found


def four_ways(average: Any, when_ready: Any, groups: Any, in_buckets: Any) -> list[Any]:
    """In a rank: gradients of the lab's three ways and of PyTorch's."""
    limit_mb = 0.0015
    naive, overlapped, bucketed, theirs = (network() for _ in range(4))
    when_ready(overlapped)
    order = list(reversed(list(bucketed.parameters())))
    sizes = [p.numel() * p.element_size() for p in order]
    found = groups(sizes, int(limit_mb * 2**20))
    in_buckets([[order[i] for i in group] for group in found])
    ddp = DistributedDataParallel(theirs, bucket_cap_mb=limit_mb)
    ways = [(naive, naive, average), (overlapped, overlapped), (bucketed, bucketed), (ddp, theirs)]
    return [len(found), *(passes(*way) for way in ways)]


def small_resnet(in_buckets: Any) -> list[float]:
    """In a rank: how far the gradients of three steps are from PyTorch's, relative to them."""
    theirs, ours = (lab.models.create("resnet_small", depth=8) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    ddp = DistributedDataParallel(theirs)
    in_buckets([list(reversed(list(ours.parameters())))])
    ours.load_state_dict(theirs.state_dict())
    off = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        x, y = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
        for call, module in ((ddp, theirs), (ours, ours)):
            module.zero_grad()
            F.cross_entropy(call(x), y).backward()
        off.append(((flat(ours) - flat(theirs)).norm() / flat(theirs).norm()).item())
    return off


def accumulated(accumulate: Any) -> torch.Tensor:
    module = network()
    accumulate(DistributedDataParallel(module), [batch(dist.get_rank(), step) for step in range(3)])
    return flat(module)


def one_flat_message(module: nn.Module) -> None:
    """Averages all gradients with a single all-reduce: right too."""
    parameters = list(module.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)


def gathered_and_averaged(module: nn.Module) -> None:
    """Averages without any all-reduce: right too."""
    for p in module.parameters():
        everybody = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, p.grad)
        p.grad = torch.stack(everybody).mean(0).detach()


def indices_as_tensor(length: int, ranks: int, rank: int) -> torch.Tensor:
    """The sampler's indices as a tensor: as good as a list."""
    return torch.arange(-(-length // ranks) * ranks)[rank::ranks] % length


def divided_afterwards(module: nn.Module) -> None:
    works: list[Any] = []
    parameters = list(module.parameters())

    def ready(parameter: Any) -> None:
        works.append((parameter, torch.distributed.all_reduce(parameter.grad, async_op=True)))
        if len(works) == len(parameters):
            while works:
                reduced, work = works.pop()
                work.wait()
                reduced.grad.div_(dist.get_world_size())

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)


def copied_back(groups: list[list[nn.Parameter]]) -> None:
    held: list[dict[Any, torch.Tensor]] = [{} for _ in groups]
    works: list[Any] = []

    def ready(parameter: Any) -> None:
        (number,) = [n for n, g in enumerate(groups) if any(p is parameter for p in g)]
        held[number][parameter] = parameter.grad.flatten()
        if len(held[number]) == len(groups[number]):
            bucket = torch.cat(list(held[number].values()))
            works.append((number, bucket, dist.all_reduce(bucket, async_op=True)))
        if len(works) == len(groups):
            for number, bucket, work in works:
                work.wait()
                parts = bucket.split([len(part) for part in held[number].values()])
                for p, part in zip(held[number], parts):
                    p.grad = part.view_as(p) / dist.get_world_size()
                held[number].clear()
            works.clear()

    for group in groups:
        for parameter in group:
            parameter.register_post_accumulate_grad_hook(ready)


def synchronised_norm() -> torch.Tensor:
    device = lab.device()
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).to(device)
    ddp = DistributedDataParallel(norm, device_ids=[device.index])
    rows = torch.arange(24.0).view(8, 3).sin().split(4)[dist.get_rank()]
    return ddp(rows.to(device)).detach().cpu()
