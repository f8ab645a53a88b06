"""Ring all-reduce: a reduce-scatter, then an all-gather, each in (ranks - 1) steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

lab = "03"


def ring_all_reduce(x: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, preceding = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = list(x.tensor_split(ranks))
    received = torch.empty_like(chunks[0])

    def step(send: int, into: torch.Tensor) -> None:
        receiving = dist.irecv(into, preceding)  # ready before anybody sends
        sending = dist.isend(chunks[send % ranks], following)
        receiving.wait()
        sending.wait()

    for s in range(ranks - 1):  # reduce-scatter: add what arrives to your own
        arriving = chunks[(rank - s - 1) % ranks]
        step(rank - s, received[: len(arriving)])
        arriving += received[: len(arriving)]
    for s in range(ranks - 1):  # all-gather: pass the finished chunks on
        step(rank - s + 1, chunks[(rank - s) % ranks])


def job(all_reduce: Callable[[torch.Tensor], object], numbers: int) -> dict[str, object]:
    """In a rank: the result, and the number of bytes that this rank sent."""
    rank, sent = dist.get_rank(), 0
    send, isend = dist.send, dist.isend

    def count(original: Callable[..., object]) -> Callable[..., object]:
        def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            nonlocal sent
            sent += tensor.numel() * tensor.element_size()
            return original(tensor, *args, **kwargs)

        return counted

    x = torch.arange(numbers, dtype=torch.float32) * (rank + 1) + 10 * rank
    dist.send, dist.isend = count(send), count(isend)  # type: ignore[assignment]
    try:
        all_reduce(x)
    finally:
        dist.send, dist.isend = send, isend
    return {"x": x, "bytes sent": sent}


def run(answer: Callable[[torch.Tensor], object], ranks: int, numbers: int) -> list[object]:
    """What each rank holds afterwards, and what it sent."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, numbers), timeout=5, record=False)
    return list(done.results)


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(2, 4), (3, 6), (4, 4 * rng.randint(2, 20)), (4, 10)]


hints = [
    "Cut x into as many chunks as there are ranks: x.tensor_split(ranks) gives views, so adding to "
    "a chunk changes x.",
    "In step s of the reduce-scatter send chunk (rank - s) and receive chunk (rank - s - 1), both "
    "modulo ranks; add what arrives to your own chunk.",
    "After ranks - 1 steps, chunk (rank + 1) is complete on this rank. In step s of the all-gather "
    "send chunk (rank - s + 1) and receive chunk (rank - s), without adding.",
    "Everybody sends and receives at once: start with sending = dist.isend(...), then "
    "dist.recv(...), then sending.wait(). Two blocking sends facing each other wait for ever.",
]
