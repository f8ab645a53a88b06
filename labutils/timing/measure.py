"""``labutils measure-hardware``: measure this machine, and write a profile of it.

One process per rank measures at the same time as the others, since they share memory and cores in a
run as well: matrix products and convolutions by size, memory bandwidth, the shortest operation,
copies to the device, and an all-reduce by size (gloo on CPUs, NCCL on GPUs).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..notebooks import write_whole
from . import profiles
from .measured import WAYS, Measured, report, toml

MATMUL_SIZES = (64, 128, 256, 512, 1024)
CONV_SIZES = (8, 16, 32, 64)
"""Channels of 3 x 3 convolutions of images of 32 x 32."""
STRETCHES = 10
"""Times that each number is measured."""
REDUCE_BYTES = tuple(4**n << 10 for n in range(8))
"""1 KiB to 16 MiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--out``, ``--ranks`` and ``--seconds``."""
    parser.add_argument("--out", required=True, help="the TOML file to write")
    parser.add_argument("--ranks", type=int, help="processes; one per GPU, or two on a CPU")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="time for each number (default: 0.1)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Measure, write, and print the numbers."""
    path = Path(arguments.out)
    if path.suffix != ".toml":
        raise ValueError(f"--out is {arguments.out!r}, but a profile's name ends in .toml.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"There is no folder {str(path.absolute().parent)!r} to write to.")
    measured = measure(arguments.ranks, arguments.seconds)
    write_whole(path, toml(measured))
    profiles.load(path)
    print(report(measured))
    print(f"Written to {path}: lab.predict(..., profile={str(path)!r}).")
    return 0


def measure(ranks: int | None = None, seconds: float = 0.1) -> Measured:
    """The numbers of this machine, as rank 0 finds them while all ranks measure.

    Args:
        ranks: processes; by default one per GPU, or two on a CPU with two cores or more.
        seconds: time to spend on each number.

    Raises:
        ValueError: ``ranks`` is not possible here, or ``seconds`` not positive.
    """
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    most = gpus or cores
    ranks = (gpus or min(2, cores)) if ranks is None else ranks
    if not 1 <= ranks <= most:
        what = "GPUs" if gpus else "cores"
        raise ValueError(f"This machine has {most} {what}, so ranks cannot be {ranks}.")
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, but is {seconds}.")
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, cores // ranks)
        torch.multiprocessing.spawn(_rank, (ranks, threads, seconds, folder), nprocs=ranks)
        found: Measured = json.loads(Path(folder, "measured.json").read_text(encoding="utf-8"))
    return found


# ------------------------------------------------------------------------------------- in each rank


def _rank(rank: int, ranks: int, threads: int, seconds: float, folder: str) -> None:
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank,
        world_size=ranks,
    )  # fmt: skip
    try:
        clock = Clock(device, seconds)
        found = computing(device, ranks, threads, clock)
        found["all_reduce"] = _all_reduce(device, clock) if ranks > 1 else []
        found["busy"] = _busy() if ranks > 1 and not cuda else 0.0
        if rank == 0:
            Path(folder, "measured.json").write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Clock:
    """Times a function on one device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def time(self, function: Callable[[], Any]) -> float:
        """Seconds of one call: the best of several stretches, all ranks at once.

        Other programs on the machine only ever make a stretch longer.
        """
        dist.barrier()
        once = max(self._run(function, 2) / 2, 1e-7)
        calls = max(1, round(self.seconds / STRETCHES / once))
        return min(self._run(function, calls) / calls for _ in range(STRETCHES))

    def together(self, function: Callable[[], Any], calls: int) -> float:
        """The same for a collective: every rank makes as many calls."""
        self._run(function, 2)
        times = []
        for _ in range(STRETCHES):
            dist.barrier()
            times.append(self._run(function, calls) / calls)
        return min(times)

    def _run(self, function: Callable[[], Any], calls: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def computing(device: torch.device, ranks: int, threads: int, clock: Clock) -> Measured:
    """In a rank: what was measured of everything but the network, on all ranks at once."""
    dtypes = ["float32"] + (["float16", "bfloat16"] if device.type == "cuda" else [])
    return {
        "kind": device.type,
        "ranks": ranks,
        "threads": threads,
        "date": datetime.date.today().isoformat(),
        "matmul": {name: _matmul(device, getattr(torch, name), clock) for name in dtypes},
        "conv": _conv(device, clock),
        "bandwidth": _bandwidth(device, clock),
        "shortest": _shortest(device, clock),
        "to_device": _to_device(device, clock) if device.type == "cuda" else {},
        **_identity(device, ranks),
    }


def _matmul(device: torch.device, dtype: torch.dtype, clock: Clock) -> list[list[float]]:
    """[n, FLOP/s] of products of n x n matrices."""
    found = []
    for n in MATMUL_SIZES if device.type == "cpu" else (*MATMUL_SIZES, 2048, 4096, 8192):
        a = torch.ones(n, n, dtype=dtype, device=device)
        found.append([n, 2 * n**3 / clock.time(lambda a=a: a @ a)])  # type: ignore[misc]
    return found


def _conv(device: torch.device, clock: Clock) -> list[list[float]]:
    """[channels, FLOP/s] of 3 x 3 convolutions, forward and backward (three products)."""
    found = []
    for n in CONV_SIZES if device.type == "cpu" else (*CONV_SIZES, 128, 256):
        x, w = torch.ones(16, n, 32, 32, device=device), torch.ones(n, n, 3, 3, device=device)
        gradient = torch.ones_like(x)
        inputs = x.requires_grad_(), w.requires_grad_()
        run = clock.time(partial(_train_conv, inputs, gradient))
        found.append([n, 3 * 2 * 16 * 32 * 32 * n * n * 9 / run])
    return found


@torch.enable_grad()
def _train_conv(inputs: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor) -> None:
    torch.autograd.grad(F.conv2d(*inputs, padding=1), inputs, gradient)


def _bandwidth(device: torch.device, clock: Clock) -> float:
    """Bytes per second of y = a + b, on arrays far beyond any cache (64 MiB each)."""
    a, b = (torch.ones(1 << 24, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 3 * a.nbytes / clock.time(lambda: torch.add(a, b, out=out))


def _shortest(device: torch.device, clock: Clock) -> float:
    """Seconds of an operation on next to nothing."""
    x = torch.ones(8, device=device)
    return clock.time(lambda: x.add_(1))


def _to_device(device: torch.device, clock: Clock) -> dict[str, float]:
    """Bytes per second from pinned and pageable memory, and seconds of the shortest copy."""
    found = {}
    for way in WAYS:
        host = torch.ones(1 << 24, pin_memory=way == "pinned")
        found[way] = host.nbytes / clock.time(lambda host=host: host.to(device))  # type: ignore[misc]
    word = torch.ones(1).pin_memory()
    found["latency"] = clock.time(lambda: word.to(device))
    return found


def _all_reduce(device: torch.device, clock: Clock) -> list[list[float]]:
    """[bytes, seconds] of an all-reduce over all ranks.

    Other programs only ever make a size longer, so none is taken to need more than a larger one.
    """
    found = []
    for nbytes in REDUCE_BYTES:
        tensor = torch.zeros(nbytes // 4, device=device)
        calls = max(2, min(100, (1 << 21) // nbytes))
        run = clock.together(lambda tensor=tensor: dist.all_reduce(tensor), calls)  # type: ignore[misc]
        found.append([nbytes, run])
    least = itertools.accumulate((seconds for _, seconds in found[::-1]), min)
    return [[nbytes, seconds] for (nbytes, _), seconds in zip(found, [*least][::-1], strict=True)]


def _busy() -> float:
    """Processor seconds that this process spends on the largest all-reduce, all threads together.

    Waiting does not count, so that other programs on the machine hardly matter.
    """
    tensor, found = torch.zeros(REDUCE_BYTES[-1] // 4), []
    for _ in range(STRETCHES):
        dist.barrier()
        before = time.process_time()
        dist.all_reduce(tensor)
        found.append(time.process_time() - before)
    return min(found)


def _identity(device: torch.device, ranks: int) -> Measured:
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        memory, processors = card.total_memory, card.multi_processor_count
        return {"name": card.name, "memory": memory, "processors": processors}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return {"name": "CPU", "memory": memory, "processors": 1}


__all__ = ["add_arguments", "main", "measure"]
