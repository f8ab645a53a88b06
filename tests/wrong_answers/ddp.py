"""Plausible wrong answers to the exercises of the lab on DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
Groups = list[list[nn.Parameter]]


def summed(module: nn.Module) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)


def divided_only(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad /= dist.get_world_size()  # type: ignore[operator]


def parameters_averaged(module: nn.Module) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def weights_only(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()  # type: ignore[operator]


def broadcast_from_rank_0(module: nn.Module) -> None:
    for parameter in module.parameters():
        dist.broadcast(parameter.grad, src=0)


def reduced_one_after_the_other(module: nn.Module) -> None:
    def ready(parameter: Any) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)  # blocks the backward until it is done

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(ready)


def reduced_and_waited_for_at_once(module: nn.Module) -> None:
    def ready(parameter: Any) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad, async_op=True).wait()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(ready)


def reduced_all_at_the_end(module: nn.Module) -> None:
    arrived: list[Any] = []
    total = len(list(module.parameters()))

    def ready(parameter: Any) -> None:
        arrived.append(parameter)
        if len(arrived) == total:
            works = [dist.all_reduce(p.grad, async_op=True) for p in arrived]
            for p, work in zip(arrived, works):
                work.wait()
                p.grad /= dist.get_world_size()
            arrived.clear()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(ready)


def handles_never_emptied(module: nn.Module) -> None:
    works: list[Any] = []
    total = len(list(module.parameters()))

    def ready(parameter: Any) -> None:
        parameter.grad /= dist.get_world_size()
        if len(works) < total:  # only the first pass gets this far
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        if len(works) == total:
            for work in works:
                work.wait()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(ready)


def reduced_but_summed(module: nn.Module) -> None:
    works: list[Any] = []
    total = len(list(module.parameters()))

    def ready(parameter: Any) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))
        if len(works) == total:
            for work in works:
                work.wait()
            works.clear()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(ready)


def closed_before_the_limit(sizes: list[int], limit: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += size
    return groups


def last_bucket_forgotten(sizes: list[int], limit: int) -> list[list[int]]:
    groups, group, held = [], [], 0
    for index, size in enumerate(sizes):
        group.append(index)
        held += size
        if held >= limit:
            groups.append(group)
            group, held = [], 0
    return groups


def empty_bucket_at_the_end(sizes: list[int], limit: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        groups[-1].append(index)
        held += size
        if held >= limit:
            groups.append([])
            held = 0
    return groups


def bytes_never_set_back(sizes: list[int], limit: int) -> list[list[int]]:
    groups, group, held = [], [], 0
    for index, size in enumerate(sizes):
        group.append(index)
        held += size
        if held >= limit:
            groups.append(group)
            group = []
    return groups + [group] if group else groups


def _hook_all(groups: Groups, ready: Callable[[Any], None]) -> None:
    for group in groups:
        for parameter in group:
            parameter.register_post_accumulate_grad_hook(ready)


def one_message_a_gradient(groups: Groups) -> None:
    works: list[Any] = []
    total = sum(map(len, groups))

    def ready(parameter: Any) -> None:
        parameter.grad /= dist.get_world_size()
        works.append(dist.all_reduce(parameter.grad, async_op=True))
        if len(works) == total:
            for work in works:
                work.wait()
            works.clear()

    _hook_all(groups, ready)


def one_bucket_for_all(groups: Groups) -> None:
    arrived: list[Any] = []
    total = sum(map(len, groups))

    def ready(parameter: Any) -> None:
        arrived.append(parameter)
        if len(arrived) == total:
            bucket = torch.cat([p.grad.flatten() for p in arrived]) / dist.get_world_size()
            dist.all_reduce(bucket, async_op=True).wait()
            for p, part in zip(arrived, bucket.split([p.numel() for p in arrived])):
                p.grad = part.view_as(p)
            arrived.clear()

    _hook_all(groups, ready)


def never_copied_back(groups: Groups) -> None:
    arrived: list[Any] = []
    works: list[Any] = []

    def ready(parameter: Any) -> None:
        arrived.append(parameter)
        for group in groups:
            if group[-1] is parameter:
                bucket = torch.cat([p.grad.flatten() for p in group]) / dist.get_world_size()
                works.append(dist.all_reduce(bucket, async_op=True))
        if len(works) == len(groups):
            for work in works:
                work.wait()
            works.clear()

    _hook_all(groups, ready)


def right_for_one_pass(groups: Groups) -> None:
    missing = [len(group) for group in groups]
    works: list[Any] = []
    number = {p: n for n, group in enumerate(groups) for p in group}

    def ready(parameter: Any) -> None:
        n = number[parameter]
        missing[n] -= 1  # never set back
        if missing[n] == 0:
            bucket = torch.cat([p.grad.flatten() for p in groups[n]]) / dist.get_world_size()  # type: ignore[union-attr]
            works.append((n, bucket, dist.all_reduce(bucket, async_op=True)))
        if len(works) == len(groups) and not any(missing):
            for n, bucket, work in works:
                work.wait()
                parts = bucket.split([p.numel() for p in groups[n]])
                for p, part in zip(groups[n], parts):
                    p.grad = part.view_as(p)

    _hook_all(groups, ready)


def blocks(length: int, ranks: int, rank: int) -> list[int]:
    each = -(-length // ranks)
    return [index % length for index in range(rank * each, (rank + 1) * each)]


def unpadded(length: int, ranks: int, rank: int) -> list[int]:
    return list(range(rank, length, ranks))


def rest_dropped(length: int, ranks: int, rank: int) -> list[int]:
    return list(range(rank, length // ranks * ranks, ranks))


def last_one_repeated(length: int, ranks: int, rank: int) -> list[int]:
    each = -(-length // ranks)
    return [min(rank + ranks * step, length - 1) for step in range(each)]


def not_warmed_up(step: int, warmup: int, rate: float, factor: float) -> float:
    return rate * factor


def warmed_up_from_zero(step: int, warmup: int, rate: float, factor: float) -> float:
    return rate * factor * min(1.0, step / warmup) if warmup else rate * factor


def constant_warmup(step: int, warmup: int, rate: float, factor: float) -> float:
    return rate if step < warmup else rate * factor


def square_root_scaling(step: int, warmup: int, rate: float, factor: float) -> float:
    target = rate * factor**0.5
    return target if step >= warmup else rate + (target - rate) * step / warmup


def synchronised_every_time(ddp: nn.Module, batches: list[Batch]) -> None:
    for x, y in batches:
        (F.cross_entropy(ddp(x), y) / len(batches)).backward()


def no_sync_around_backward(ddp: Any, batches: list[Batch]) -> None:
    for number, (x, y) in enumerate(batches, 1):
        loss = F.cross_entropy(ddp(x), y) / len(batches)
        if number < len(batches):
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()


def never_synchronised(ddp: Any, batches: list[Batch]) -> None:
    with ddp.no_sync():
        for x, y in batches:
            (F.cross_entropy(ddp(x), y) / len(batches)).backward()


def not_divided(ddp: Any, batches: list[Batch]) -> None:
    for number, (x, y) in enumerate(batches, 1):
        if number < len(batches):
            with ddp.no_sync():
                F.cross_entropy(ddp(x), y).backward()
        else:
            F.cross_entropy(ddp(x), y).backward()


def own_share_only(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return (model(x[rank::ranks]).argmax(1) == y[rank::ranks]).float().mean().item()


def mean_of_accuracies(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = (model(x[rank::ranks]).argmax(1) == y[rank::ranks]).float().mean()
    dist.all_reduce(mine)
    return mine.item() / ranks


def padded_shares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    from torch.utils.data import DistributedSampler

    chosen = list(DistributedSampler(range(len(x)), shuffle=False))  # type: ignore[arg-type]
    right = (model(x[chosen]).argmax(1) == y[chosen]).float().sum()
    dist.all_reduce(right)
    return right.item() / (len(chosen) * dist.get_world_size())


def everybody_everything(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return (model(x).argmax(1) == y).float().mean().item()


WRONG: dict[str, list[Callable[..., Any]]] = {
    "average_gradients": [
        summed,
        divided_only,
        parameters_averaged,
        weights_only,
        broadcast_from_rank_0,
    ],
    "reduce_when_ready": [
        reduced_one_after_the_other,
        reduced_and_waited_for_at_once,
        reduced_all_at_the_end,
        handles_never_emptied,
        reduced_but_summed,
    ],
    "bucket_groups": [
        closed_before_the_limit,
        last_bucket_forgotten,
        empty_bucket_at_the_end,
        bytes_never_set_back,
    ],
    "reduce_in_buckets": [
        one_message_a_gradient,
        one_bucket_for_all,
        never_copied_back,
        right_for_one_pass,
    ],
    "sampler_indices": [blocks, unpadded, rest_dropped, last_one_repeated],
    "learning_rate": [not_warmed_up, warmed_up_from_zero, constant_warmup, square_root_scaling],
    "accumulate_gradients": [
        synchronised_every_time,
        no_sync_around_backward,
        never_synchronised,
        not_divided,
    ],
    "exact_accuracy": [own_share_only, mean_of_accuracies, padded_shares, everybody_everything],
}
