"""Plausible wrong answers to each exercise of the labs: every one must be found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

import labutils as lab
from labutils import exercises


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


def test_every_exercise_of_the_labs_has_wrong_answers_here() -> None:
    assert set(WRONG) == set(exercises.names())
    assert all(len(answers) >= 3 for answers in WRONG.values())


@pytest.mark.parametrize(
    ("name", "answer"), [(n, a) for n, answers in WRONG.items() for a in answers]
)
def test_a_wrong_answer_is_found_out(
    name: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    if name == "data_parallel_forward":
        lab.gpus(4)
    assert lab.exercise(name)(answer) is not answer
    verdict = lab.check(name)
    assert not verdict
    assert verdict.grade.failures


def ring_with_padding_and_batches(x: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = -(-len(x) // ranks)
    padded = torch.cat([x, x.new_zeros(size * ranks - len(x))])
    chunks = list(padded.chunk(ranks))
    for s in range(2 * (ranks - 1)):
        received = torch.empty(size)
        operations = [
            dist.P2POp(dist.isend, chunks[(rank - s) % ranks], (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        target = chunks[(rank - s - 1) % ranks]
        target.copy_(target + received if s < ranks - 1 else received)
    x.copy_(padded[: len(x)])


def mean_as_a_tensor(losses: list[float], sizes: list[int]) -> torch.Tensor:
    weights = torch.tensor(sizes, dtype=torch.float64)
    return (torch.tensor(losses, dtype=torch.float64) * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    ("name", "answer"),
    [("ring_all_reduce", ring_with_padding_and_batches), ("mean_loss", mean_as_a_tensor)],
)
def test_another_right_answer_is_accepted(
    name: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    lab.exercise(name)(answer)
    assert lab.check(name), lab.check(name)
