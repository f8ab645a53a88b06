"""A rehearsed network as hardware: this machine's rates for computing, and what its links let pass.

``lab.predict(..., profile=path)`` then says what a step takes over the network of
``lab.launch(..., network="namespaces", bandwidth=...)``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from labutils.launch.network import bits_per_second, seconds
from labutils.timing import measure
from labutils.timing.measured import Measured, toml

HEADERS = 8934 / 9014
"""Share of a packet of 9,000 bytes that is payload: IP, TCP with time stamps, and Ethernet take 66
and 14 of what passes the link."""

LATENCY_S = 0.2e-3
"""One message between two processes over a link without delay: two system calls and a switch of
processes on a busy machine; an estimate, which matters only for small messages."""


def rates(seconds: float = 0.02) -> Measured:
    """In a rank: what this machine computes while all its ranks do the same.

    ``seconds`` are spent on each number.
    """
    ranks, threads = dist.get_world_size(), torch.get_num_threads()
    device = torch.device("cpu")
    return measure.computing(device, ranks, threads, measure.Clock(device, seconds))


def profile(
    measured: Measured, bandwidth: str, delay: str | None, folder: str | os.PathLike[str]
) -> str:
    """Write the profile of a rehearsed network of such a machine; returns its path.

    Raises ValueError for an impossible bandwidth or delay.
    """
    rate = bits_per_second(bandwidth) / 8 * HEADERS
    text = toml({**measured, "all_reduce": []}).replace("gpus =", 'fabric = "rehearsed"\ngpus =', 1)
    text += (
        f'\n[fabric.rehearsed]\nsource = "tc tbf, {bandwidth}, delay {delay or "0ms"}"\n'
        f"bandwidth = {rate:.6g}\nlatency = {LATENCY_S + seconds(delay):.4g}\n"
    )
    path = Path(folder) / f"rehearsed-{bandwidth}-{delay or 0}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


__all__ = ["profile", "rates"]
