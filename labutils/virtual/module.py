"""``torch.vgpu``: the virtual GPUs under the names and units of ``torch.cuda``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from labutils.virtual import streams
from labutils.virtual.memory import size
from labutils.virtual.state import state
from labutils.virtual.streams import (
    Event,
    Stream,
    current_device,
    current_stream,
    default_stream,
    index_of,
    set_device,
    set_stream,
    stream,
    synchronize,
)
from labutils.virtual.streams import on_device as device

OutOfMemoryError = torch.OutOfMemoryError
StreamContext = stream

_CAPABILITIES = {
    "P100": (6, 0), "V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "H100": (9, 0), "H200": (9, 0),
    "RTX-4090": (8, 9), "TITAN-RTX": (7, 5), "2080-Ti": (7, 5),
}  # fmt: skip
"""Compute capabilities, from developer.nvidia.com/cuda-gpus."""


@dataclass(frozen=True)
class DeviceProperties:
    """What ``get_device_properties`` tells of a virtual GPU."""

    name: str
    total_memory: int
    """Bytes."""
    multi_processor_count: int
    major: int = 0
    minor: int = 0


def is_available() -> bool:
    """Whether there are virtual GPUs."""
    return state.devices > 0


def is_initialized() -> bool:
    """Whether there are virtual GPUs (they need no initialisation of their own)."""
    return state.devices > 0


def device_count() -> int:
    """How many virtual GPUs there are."""
    return state.devices


def get_device_name(device: Any = None) -> str:
    """Name of the GPU that ``device`` imitates."""
    return f"virtual {state.gpu_name}" if index_of(device) >= 0 else ""


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Name, memory in bytes and multiprocessors of ``device``."""
    index = index_of(device)
    known = (of for name, of in _CAPABILITIES.items() if state.gpu_name.startswith(name))
    return DeviceProperties(
        get_device_name(index),
        state.ledger.capacity[index],
        state.multi_processor_count,
        *next(known, (0, 0)),
    )


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Compute capability of the GPU that ``device`` imitates; (0, 0) if it is of no known kind."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Whether the two devices can copy to each other: all can."""
    return index_of(device) != index_of(peer_device)


def init() -> None:
    """Nothing: virtual GPUs need no initialisation."""


def ipc_collect() -> None:
    """Nothing: no process shares virtual memory with another."""


def is_current_stream_capturing() -> bool:
    """Whether operations are captured in a graph: they never are."""
    return False


class device_of(device):  # noqa: N801 - named like torch.cuda.device_of
    """Within the ``with`` block, the device of ``tensor`` is current, if it is on one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "vgpu" else None)


def memory_allocated(device: Any = None) -> int:
    """Bytes that live tensors occupy on ``device``."""
    return state.ledger.allocated[index_of(device)]


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes that tensors occupied on ``device`` since ``reset_peak_memory_stats``."""
    return state.ledger.peak[index_of(device)]


def memory_reserved(device: Any = None) -> int:
    """Bytes that a caching allocator would hold on ``device``, in use or not."""
    return state.ledger.reserved[index_of(device)]


def max_memory_reserved(device: Any = None) -> int:
    """Most bytes reserved on ``device`` since ``reset_peak_memory_stats``."""
    return state.ledger.reserved_peak[index_of(device)]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peaks of ``device`` start again from what is allocated now."""
    state.ledger.reset_peak(index_of(device))


def reset_max_memory_allocated(device: Any = None) -> None:
    """The same as ``reset_peak_memory_stats``."""
    reset_peak_memory_stats(device)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The counters of ``device`` as a table; ``abbreviated`` leaves out the number of tensors."""
    stats, index = memory_stats(device), index_of(device)
    lines = [f"{get_device_name(index)}, vgpu:{index}: out of memory {stats['num_ooms']} times"]
    for title, key in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")):
        now, peak = stats[f"{key}.all.current"], stats[f"{key}.all.peak"]
        lines.append(f"{title + ' memory':<17} {size(now):>12}   peak {size(peak):>12}")
    lines.append(f"{'capacity':<17} {size(state.ledger.capacity[index]):>12}")
    if not abbreviated:
        count, made = stats["allocation.all.current"], stats["allocation.all.allocated"]
        lines.append(f"{'storages':<17} {count:>12}   made {made:>12}")
    return "\n".join(lines)


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """Counters of ``device`` under the keys of ``torch.cuda.memory_stats``."""
    index, ledger = index_of(device), state.ledger
    return OrderedDict(
        {
            "allocated_bytes.all.current": ledger.allocated[index],
            "allocated_bytes.all.peak": ledger.peak[index],
            "allocated_bytes.all.allocated": ledger.total_allocated[index],
            "allocated_bytes.all.freed": ledger.total_allocated[index] - ledger.allocated[index],
            "allocation.all.allocated": ledger.allocations[index],
            "allocation.all.freed": ledger.frees[index],
            "allocation.all.current": ledger.allocations[index] - ledger.frees[index],
            "reserved_bytes.all.current": ledger.reserved[index],
            "reserved_bytes.all.peak": ledger.reserved_peak[index],
            "num_ooms": ledger.out_of_memory[index],
        }
    )


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of ``device``; reserved memory is not free."""
    index = index_of(device)
    total = state.ledger.capacity[index]
    return total - state.ledger.reserved[index], total


def empty_cache() -> None:
    """Give back reserved memory that no tensor uses."""
    state.ledger.empty_cache()


def manual_seed(seed: int) -> None:
    """Seed the generator that all virtual GPUs share with the CPU."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generator of all virtual GPUs (``torch.manual_seed`` calls this too)."""
    torch.default_generator.manual_seed(seed)


def seed() -> None:
    """Seed the generator that all virtual GPUs share with the CPU with a random number."""
    torch.default_generator.seed()


seed_all = seed


def initial_seed() -> int:
    """What the generator was seeded with."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the generator that all virtual GPUs share with the CPU."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the state that ``get_rng_state`` returned."""
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of the one generator, once per device."""
    return [get_rng_state(i) for i in range(state.devices)]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set what ``get_rng_state_all`` returned."""
    for index, new_state in enumerate(new_states):
        set_rng_state(new_state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The precisions that ``torch.autocast("vgpu", …)`` accepts."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 can be used: always; without emulation, where the GPU imitated can."""
    return including_emulation or get_device_capability() >= (8, 0)


def is_tf32_supported() -> bool:
    """Whether the GPU that is imitated has TF32."""
    return get_device_capability() >= (8, 0)


def _is_in_bad_fork() -> bool:
    return False


def __getattr__(name: str) -> Any:
    """Say of what only ``torch.cuda`` has that it is not here."""
    if not name.startswith("_") and hasattr(torch.cuda, name):
        raise AttributeError(
            f"torch.vgpu has no {name!r}: of torch.cuda, virtual GPUs have devices, streams, "
            "events, memory and random numbers."
        )
    raise AttributeError(f"module 'torch.vgpu' has no attribute {name!r}")


__all__ = [
    "DeviceProperties",
    "Event",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "streams",
    "synchronize",
]
