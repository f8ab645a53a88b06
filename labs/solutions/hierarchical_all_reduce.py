"""An all-reduce that crosses between nodes once: within nodes, between leaders, within nodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

lab = "05"


def hierarchical_all_reduce(x: torch.Tensor, node: Any, leaders: Any, first: int) -> None:
    dist.reduce(x, dst=first, group=node)
    if dist.get_rank() == first:
        dist.all_reduce(x, group=leaders)
    dist.broadcast(x, src=first, group=node)


def groups(nodes: int, gpus: int) -> tuple[Any, Any, int]:
    """In a rank: the group of its node, the group of the nodes' first ranks, its node's first."""
    firsts = [node * gpus for node in range(nodes)]
    members = [dist.new_group(list(range(first, first + gpus))) for first in firsts]
    leaders = dist.new_group(firsts)
    node = dist.get_rank() // gpus
    return members[node], leaders, firsts[node]


def job(answer: Callable[..., object], nodes: int, gpus: int, numbers: int) -> torch.Tensor:
    """In a rank: reduce ``numbers`` numbers that depend on the rank, in place."""
    x = torch.arange(numbers, dtype=torch.float32) * (dist.get_rank() + 1) + dist.get_rank()
    answer(x, *groups(nodes, gpus))
    return x


def run(answer: Callable[..., object], nodes: int, gpus: int, numbers: int) -> dict[str, object]:
    """What each rank holds, and the largest group in which something was communicated."""
    import labutils

    done = labutils.launch(job, nodes * gpus, args=(answer, nodes, gpus, numbers), timeout=5)
    calls = [s for s in done.trace.spans if s.lane == "communication" and s.kind != "wait"]
    sizes = [int(s.detail.rsplit("group of ", 1)[-1]) for s in calls if "group of " in s.detail]
    return {"x": list(done.results), "ranks in the largest group": max(sizes, default=0)}


def cases(rng: random.Random) -> Iterator[tuple[int, int, int]]:
    yield from [(2, 2, 4), (2, 3, 4), (3, 2, rng.randint(5, 20))]


hints = [
    "Three steps: the sum of the node on its first rank; the sum over the nodes on all first "
    "ranks; that sum to everybody on the node.",
    "dist.reduce(x, dst=first, group=node), where dst is a rank of the whole world.",
    "Only first ranks are in leaders, so only they may call dist.all_reduce(x, group=leaders).",
    "Then dist.broadcast(x, src=first, group=node).",
]
