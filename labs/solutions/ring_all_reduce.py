"""Ring all-reduce: a reduce-scatter, then an all-gather, each in (ranks - 1) steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

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


def job(all_reduce: Callable[[torch.Tensor], object], numbers: int) -> torch.Tensor:
    """In a rank: all-reduce ``numbers`` numbers that depend on the rank, in place."""
    rank = dist.get_rank()
    x = torch.arange(numbers, dtype=torch.float32) * (rank + 1) + 10 * rank
    all_reduce(x)
    return x


def run(answer: Callable[[torch.Tensor], object], ranks: int, numbers: int) -> dict[str, object]:
    """What each rank holds afterwards, the bytes that it sent, and other collectives called."""
    import labutils

    done = labutils.launch(job, ranks, args=(answer, numbers), timeout=5)
    spans = [s for s in done.trace.spans if s.lane == "communication" and s.kind != "wait"]

    def rows(rank: int) -> tuple[str, str]:
        """What a rank's row is called, without and with a GPU in use."""
        return f"rank {rank}", f"GPU {rank}"

    sent = [
        sum(s.bytes for s in spans if s.device in rows(r) and s.name in ("send", "isend"))
        for r in range(ranks)
    ]
    allowed = {"send", "recv", "isend", "irecv", "barrier"}
    others = sorted({s.name for s in spans} - allowed)
    return {"x": list(done.results), "bytes sent": sent, "other collectives": others}


def compare(yours: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Values and calls must agree; where chunks are unequal, padding may add a number to each."""
    for mine, right in zip(yours["x"], expected["x"], strict=True):
        if mine.shape != right.shape or not torch.allclose(mine, right):
            return "x: other values"
    if yours["other collectives"]:
        return f"uses {', '.join(yours['other collectives'])}, not only sends and receives"
    ranks = len(expected["x"])
    slack = 4 * 2 * (ranks - 1) if len(expected["x"][0]) % ranks else 0
    pairs = zip(yours["bytes sent"], expected["bytes sent"], strict=True)
    if any(abs(mine - right) > slack for mine, right in pairs):
        return "bytes sent: another number"
    return None


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
