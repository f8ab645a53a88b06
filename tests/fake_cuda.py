"""Two GPUs that are not there: answers to the calls that labutils makes of ``torch.cuda``.

The answers are as PyTorch documents them; ``tests/gpu`` runs the same code on real GPUs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 2**30
NAME = "Fake GPU"


class Event:
    """On a stream that reaches it ``fake.delay`` milliseconds after it was recorded."""

    fake: FakeCuda

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "elapsed_time needs timing"
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = self.fake.now_ms + self.fake.delay_ms

    def query(self) -> bool:
        return self.at_ms is not None and self.at_ms <= self.fake.now_ms

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "CUDA refuses events that have not been reached"
        assert self.at_ms is not None and end.at_ms is not None
        return end.at_ms - self.at_ms


class FakeCuda:
    """Two GPUs of 16 GiB; the second holds ever more memory."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        self.current: list[int] = []
        self.asked = 0
        self.now_ms, self.delay_ms = 0.0, 0.0
        properties = SimpleNamespace(name=NAME, total_memory=16 * GIB, multi_processor_count=108)
        self.answers: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 2,
            "mem_get_info": lambda device: (15 * GIB, 16 * GIB),
            "get_device_name": lambda device: NAME,
            "get_device_properties": lambda device: properties,
            "synchronize": self.synchronize,
            "memory_allocated": self.memory_allocated,
            "set_device": self.current.append,
            "Event": type("Event", (Event,), {"fake": self}),
            "nccl": SimpleNamespace(version=lambda: (2, 28, 3)),
        }

    def synchronize(self, device: Any = None) -> None:
        """All that was recorded has been reached."""
        self.waited.append(device)
        self.now_ms += self.delay_ms

    def memory_allocated(self, device: Any) -> int:
        self.asked += 1
        index = device if isinstance(device, int) else device.index
        return GIB if index == 0 else self.asked * GIB

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in self.answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
