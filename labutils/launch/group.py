"""A rank's device and its process group.

The group is ready before the user's code runs.  Code that makes its own, as scripts do, works as
well, as often as it is run: the group that is there is replaced, over fresh keys of the same store.
"""

from __future__ import annotations

import functools
import itertools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

BOTH = {"nccl": "cpu:gloo,cuda:nccl"}
"""Where nobody asked for a backend, tensors on the CPU can be exchanged too."""

_device = torch.device("cpu")
_recorded = torch.device("cpu")
_store: dist.Store | None = None
_generation = itertools.count()


def device() -> torch.device:
    """This rank's GPU: a real one where there are enough, else a virtual one, else the CPU."""
    global _recorded
    if _recorded != _device:
        from labutils import telemetry

        _recorded = _device
        telemetry.move(_device)
    return _device


def recorded_device() -> torch.device:
    """The device whose memory telemetry reports: the rank's GPU once it is in use."""
    return _recorded


def rank_device(local_rank: int, gpus: int, virtual: dict[str, Any]) -> torch.device:
    """``cuda:i`` where there are GPUs, shared if they are too few; else virtual, else CPU."""
    if gpus:
        index = local_rank % gpus
        torch.cuda.set_device(index)  # also for what names no device: "cuda", events, streams
        return torch.device("cuda", index)
    try:
        from labutils import virtual as vgpu

        vgpu.enable(**virtual)
    except ImportError:
        return torch.device("cpu")
    return torch.device("vgpu", local_rank)


def choose_device(config: dict[str, Any]) -> torch.device:
    """Make :func:`device` this rank's GPU."""
    global _device, _recorded
    local_rank = config["local_rank"]
    _device = rank_device(local_rank, config["gpus"], config["virtual"])
    _recorded = (
        _device if config["virtual_in_use"] or _device.type == "cuda" else torch.device("cpu")
    )
    return _device


def install(config: dict[str, Any]) -> None:
    """Make a plain ``dist.init_process_group()`` do the right thing in this rank."""
    original = getattr(distributed_c10d.init_process_group, "__wrapped__", None)
    original = original or distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(
        backend: Any = None, init_method: Any = None, *args: Any, **more: Any
    ) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        elsewhere = args or more.get("store") or init_method not in (None, "env://")
        if not elsewhere:
            more |= {
                "store": _fresh_store(),
                "rank": config["rank"],
                "world_size": config["world_size"],
            }
            init_method = None
        chosen = backend or BOTH.get(config["backend"], config["backend"])
        original(chosen, init_method, *args, **more)

    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _fresh_store() -> dist.Store:
    global _store
    if _store is None:
        _store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
            timeout=timedelta(minutes=5),
        )  # fmt: skip
    return dist.PrefixStore(f"labutils/{next(_generation)}", _store)
