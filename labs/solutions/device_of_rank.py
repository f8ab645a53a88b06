"""The GPU of a rank, from the environment that torchrun gives it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import torch

lab = "06"


def device_of_rank(environment: Mapping[str, str]) -> torch.device:
    return torch.device("cuda", int(environment["LOCAL_RANK"]))


def run(
    answer: Callable[[Mapping[str, str]], torch.device], nodes: int, gpus: int
) -> list[int | None]:
    """The number of every rank's GPU, of ``nodes`` nodes with ``gpus`` GPUs each."""
    devices = []
    for rank in range(nodes * gpus):
        numbers = {
            "RANK": rank, "LOCAL_RANK": rank % gpus, "GROUP_RANK": rank // gpus,
            "WORLD_SIZE": nodes * gpus, "LOCAL_WORLD_SIZE": gpus,
        }  # fmt: skip
        device = answer({name: str(number) for name, number in numbers.items()})
        if not isinstance(device, torch.device | str) or torch.device(device).type == "cpu":
            raise TypeError(f"a GPU is wanted, not {device!r}")
        devices.append(torch.device(device).index)
    return devices


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(1, 2), (2, 2), (rng.randint(3, 4), 8)]


hints = [
    "RANK counts over all nodes; a node's GPUs are numbered from 0 on every node.",
    "LOCAL_RANK counts on the node. What stands in an environment is text: int(...).",
]
