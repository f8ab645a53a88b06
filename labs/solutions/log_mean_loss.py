"""The mean loss of all ranks, for rank 0 to log."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

lab = "06"


def log_mean_loss(loss: torch.Tensor) -> float | None:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size() if dist.get_rank() == 0 else None


def run(answer: Callable[[torch.Tensor], float | None], losses: list[float]) -> list[object]:
    """What each rank returns, and its loss afterwards; ``losses`` has one number per rank."""
    import labutils

    def job(losses: list[float]) -> object:
        loss = torch.tensor(losses[dist.get_rank()])
        return {"returned": answer(loss), "its own loss afterwards": loss}

    done = labutils.launch(job, len(losses), args=(losses,), timeout=5, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[list[float]]]:
    yield from [([1.0, 3.0],), ([0.5, 0.25],), ([2.0, 4.0, rng.randint(5, 9) / 2],)]


hints = [
    "A collective inside `if rank == 0` waits for ranks that never come: first it, then the if.",
    "all_reduce works in place: give it a copy, or the rank's own loss is gone.",
    "Sum over the ranks, divided by the world size; other ranks than 0 return None.",
]
