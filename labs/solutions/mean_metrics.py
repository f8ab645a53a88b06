"""Average a dictionary of metrics over the ranks, whatever order each rank holds it in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

lab = "06"


def mean_metrics(metrics: dict[str, float]) -> dict[str, float]:
    names = sorted(metrics)
    values = torch.tensor([metrics[name] for name in names], dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(names, (values / dist.get_world_size()).tolist()))


def job(answer: Callable[[dict[str, float]], dict[str, float]], count: int) -> dict[str, float]:
    """In a rank: metrics whose order, by insertion and by value, depends on the rank."""
    rank = dist.get_rank()
    names = [f"metric {i}" for i in range(count)]
    turned = names[rank % count :] + names[: rank % count]
    return answer({name: 10.0 * place + rank for place, name in enumerate(turned)})


def run(answer: Callable[[dict[str, float]], dict[str, float]], ranks: int, count: int) -> object:
    """What each rank returns."""
    import labutils

    return list(labutils.launch(job, ranks, args=(answer, count), timeout=5, record=False).results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 2), (2, 3), (3, rng.randint(4, 6))]


hints = [
    "Ranks meet in collectives by order of calls, not by name: the first with the first.",
    "Bring the names into an order that does not depend on the values: sorted(metrics).",
    "One tensor with all the values, one all_reduce, divided by the world size.",
]
