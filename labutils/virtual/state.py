"""The one set of virtual GPUs of this process: how many, of what kind, and what they have done."""

from __future__ import annotations

from dataclasses import dataclass, field

from labutils.virtual.memory import Ledger
from labutils.virtual.record import Recorder

MOST_DEVICES = 64


@dataclass(slots=True)
class State:
    """Shared by the modules of this package; changed by ``enable`` only."""

    devices: int = 0
    """How many virtual GPUs there are; 0 until ``enable``."""
    phantom: bool = False
    """Tensors have shapes and sizes but no values."""
    profile: str = ""
    """Name of the hardware profile that they imitate."""
    gpu_name: str = ""
    multi_processor_count: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    recorder: Recorder = field(default_factory=Recorder)

    def known(self) -> str:
        """Which devices there are, in words."""
        if not self.devices:
            return "there are no virtual GPUs now"
        return f"there are {self.devices} virtual GPUs, vgpu:0 to vgpu:{self.devices - 1}"


state = State()
