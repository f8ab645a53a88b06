"""``torch.vgpu``: the virtual GPUs under the names and units of ``torch.cuda``."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from labutils.virtual import streams
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
    return DeviceProperties(
        get_device_name(index), state.ledger.capacity[index], state.multi_processor_count
    )


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


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the generator that all virtual GPUs share with the CPU."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the state that ``get_rng_state`` returned."""
    torch.set_rng_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The precisions that ``torch.autocast("vgpu", …)`` accepts."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    """Whether bfloat16 can be used: on virtual GPUs, always."""
    return True


def _is_in_bad_fork() -> bool:
    return False


__all__ = [
    "DeviceProperties",
    "Event",
    "OutOfMemoryError",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "is_available",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "streams",
    "synchronize",
]
