"""Plausible wrong answers to the exercises of the lab on collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def naive_only_on_rank_0(x: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        for source in range(1, dist.get_world_size()):
            other = torch.empty_like(x)
            dist.recv(other, source)
            x += other
    else:
        dist.send(x, 0)


def naive_by_overwriting(x: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        for source in range(1, dist.get_world_size()):
            dist.recv(x, source)
        for target in range(1, dist.get_world_size()):
            dist.send(x, target)
    else:
        dist.send(x, 0)
        dist.recv(x, 0)


def naive_by_the_library(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def ring_without_the_second_half(x: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = list(x.tensor_split(ranks))
    for s in range(ranks - 1):
        target = chunks[(rank - s - 1) % ranks]
        received = torch.empty_like(target)
        sending = dist.isend(chunks[(rank - s) % ranks], (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)
        sending.wait()
        target += received


def ring_of_whole_tensors(x: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    passing = x.clone()
    for _ in range(ranks - 1):
        received = torch.empty_like(x)
        sending = dist.isend(passing, (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)
        sending.wait()
        x += received
        passing = received


def naive_by_other_collectives(x: torch.Tensor) -> None:
    dist.reduce(x, 0)
    dist.broadcast(x, 0)


def ring_for_show(x: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    junk = torch.empty(len(x) // ranks)
    for _ in range(2 * (ranks - 1)):
        sending = dist.isend(junk.clone(), (rank + 1) % ranks)
        dist.recv(junk, (rank - 1) % ranks)
        sending.wait()
    dist.all_reduce(x)


def ring_by_the_library(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def sends_all_of_it(nbytes: int, ranks: int) -> float:
    return 2 * (ranks - 1) * nbytes


def sends_one_half(nbytes: int, ranks: int) -> float:
    return (ranks - 1) / ranks * nbytes


def sends_twice(nbytes: int, ranks: int) -> float:
    return 2.0 * nbytes


def algorithm_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    return nbytes / seconds


def bandwidth_of_all_gather(nbytes: int, seconds: float, ranks: int) -> float:
    return nbytes / seconds * (ranks - 1) / ranks


def bandwidth_times_ranks(nbytes: int, seconds: float, ranks: int) -> float:
    return nbytes / seconds * ranks


def mean_of_ranks_means(values: torch.Tensor) -> float:
    mean = values.mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def mean_of_own_share(values: torch.Tensor) -> float:
    return values.mean().item()


def mean_of_sums(values: torch.Tensor) -> float:
    total = values.sum()
    dist.all_reduce(total)
    return total.item() / len(values)


WRONG: dict[str, list[Callable[..., Any]]] = {
    "naive_all_reduce": [
        naive_only_on_rank_0,
        naive_by_overwriting,
        naive_by_the_library,
        naive_by_other_collectives,
    ],
    "ring_all_reduce": [
        ring_without_the_second_half,
        ring_of_whole_tensors,
        ring_by_the_library,
        ring_for_show,
    ],
    "ring_bytes": [sends_all_of_it, sends_one_half, sends_twice],
    "bus_bandwidth": [algorithm_bandwidth, bandwidth_of_all_gather, bandwidth_times_ranks],
    "mean_over_ranks": [mean_of_ranks_means, mean_of_own_share, mean_of_sums],
}
