"""Plausible wrong answers to the exercises of the lab on DataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter


def shard_rounded_down(batch: int, gpus: int) -> list[int]:
    return [batch // gpus] * gpus


def shard_as_array_split(batch: int, gpus: int) -> list[int]:
    return [batch // gpus + (i < batch % gpus) for i in range(gpus)]


def shard_with_empty_ones(batch: int, gpus: int) -> list[int]:
    size = -(-batch // gpus)
    return [max(0, min(size, batch - i * size)) for i in range(gpus)]


def forward_on_one_gpu(module: nn.Module, batch: torch.Tensor, devices: Any) -> torch.Tensor:
    return module(batch.to(devices[0]))


def forward_on_more_replicas_than_shards(
    module: nn.Module, batch: torch.Tensor, devices: Any
) -> torch.Tensor:
    shards, replicas = scatter(batch, devices), replicate(module, devices)
    return gather(parallel_apply(replicas, shards, devices=devices), devices[0])


def forward_gathered_on_the_last(
    module: nn.Module, batch: torch.Tensor, devices: Any
) -> torch.Tensor:
    shards = scatter(batch, devices)
    used = devices[: len(shards)]
    outputs = parallel_apply(replicate(module, used), shards, devices=used)
    return gather(outputs, devices[-1])


def forward_of_detached_replicas(
    module: nn.Module, batch: torch.Tensor, devices: Any
) -> torch.Tensor:
    shards = scatter(batch, devices)
    used = devices[: len(shards)]
    replicas = replicate(module, used, detach=True)
    return gather(parallel_apply(replicas, shards, devices=used), devices[0])


def mean_of_means(losses: list[float], sizes: list[int]) -> float:
    return sum(losses) / len(losses)


def sum_over_samples(losses: list[float], sizes: list[int]) -> float:
    return sum(loss * size for loss, size in zip(losses, sizes))


def mean_weighted_by_ranks(losses: list[float], sizes: list[int]) -> float:
    return sum(loss * size for loss, size in zip(losses, sizes)) / len(sizes)


def bytes_for_all_gpus(module: nn.Module, gpus: int, steps: int) -> int:
    return steps * gpus * sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def bytes_without_buffers(module: nn.Module, gpus: int, steps: int) -> int:
    return steps * (gpus - 1) * sum(t.nbytes for t in module.parameters())


def bytes_of_one_step(module: nn.Module, gpus: int, steps: int) -> int:
    return (gpus - 1) * sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def bytes_of_four_each(module: nn.Module, gpus: int, steps: int) -> int:
    return (
        4 * steps * (gpus - 1) * sum(t.numel() for t in (*module.parameters(), *module.buffers()))
    )


WRONG: dict[str, list[Callable[..., Any]]] = {
    "shard_sizes": [shard_rounded_down, shard_as_array_split, shard_with_empty_ones],
    "data_parallel_forward": [
        forward_on_one_gpu,
        forward_on_more_replicas_than_shards,
        forward_gathered_on_the_last,
        forward_of_detached_replicas,
    ],
    "mean_loss": [mean_of_means, sum_over_samples, mean_weighted_by_ranks],
    "replication_bytes": [
        bytes_for_all_gpus,
        bytes_without_buffers,
        bytes_of_one_step,
        bytes_of_four_each,
    ],
}
