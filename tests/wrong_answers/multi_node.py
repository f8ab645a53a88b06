"""Plausible wrong answers to the exercises of the lab on several nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def rank_as_local_rank(rank: int, gpus: int) -> tuple[int, int]:
    return rank // gpus, rank


def node_and_local_swapped(rank: int, gpus: int) -> tuple[int, int]:
    return rank % gpus, rank // gpus


def counted_from_one(rank: int, gpus: int) -> tuple[int, int]:
    return rank // gpus, rank % gpus + 1


def first_interface(addresses: dict[str, str], other: str) -> str:
    return next(iter(addresses.values())).split("/")[0]


def first_that_is_not_loopback(addresses: dict[str, str], other: str) -> str:
    found = [a for a in addresses.values() if not a.startswith("127.")]
    return found[0].split("/")[0]


def same_first_numbers(addresses: dict[str, str], other: str) -> str:
    start = other.split(".")[0]
    found = [a for a in addresses.values() if a.split(".")[0] == start]
    return found[0].split("/")[0]


def with_its_prefix(addresses: dict[str, str], other: str) -> str:
    start = other.rsplit(".", 2)[0]
    return next((a for a in addresses.values() if a.startswith(start)), "10.77.0.1/24")


def in_bytes(nbytes: int, seconds: float) -> float:
    return nbytes / seconds


def twice_the_bytes(nbytes: int, seconds: float) -> float:
    return 16 * nbytes / seconds


def as_long_as_both(nbytes: int, seconds: float) -> float:
    return 8 * nbytes / (2 * seconds)


def all_since_the_beginning(failures: list[int], every: int) -> int:
    return sum(failures)


def a_whole_interval(failures: list[int], every: int) -> int:
    return every * len(failures)


def only_the_last(failures: list[int], every: int) -> int:
    return failures[-1] % every if failures else 0


def up_to_the_next(failures: list[int], every: int) -> int:
    return sum(every - step % every for step in failures)


def flat(x: torch.Tensor, node: Any, leaders: Any, first: int) -> None:
    dist.all_reduce(x)


def twice_all_reduced(x: torch.Tensor, node: Any, leaders: Any, first: int) -> None:
    dist.all_reduce(x, group=node)
    if dist.get_rank() == first:
        dist.all_reduce(x, group=leaders)


def leaders_call_alone(x: torch.Tensor, node: Any, leaders: Any, first: int) -> None:
    if dist.get_rank() == first:
        dist.all_reduce(x, group=leaders)
    dist.broadcast(x, src=first, group=node)


def from_rank_0(x: torch.Tensor, node: Any, leaders: Any, first: int) -> None:
    dist.reduce(x, dst=0)
    dist.broadcast(x, src=0)


WRONG: dict[str, list[Callable[..., Any]]] = {
    "place_of_rank": [rank_as_local_rank, node_and_local_swapped, counted_from_one],
    "reachable_address": [
        first_interface,
        first_that_is_not_loopback,
        same_first_numbers,
        with_its_prefix,
    ],
    "least_bandwidth": [in_bytes, twice_the_bytes, as_long_as_both],
    "steps_lost": [all_since_the_beginning, a_whole_interval, only_the_last, up_to_the_next],
    "hierarchical_all_reduce": [flat, twice_all_reduced, leaders_call_alone, from_rank_0],
}
