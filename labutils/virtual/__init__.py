"""Virtual GPUs: PyTorch devices ``vgpu:0 … vgpu:N-1`` in plain Python, on any machine.

``enable(4)`` makes four.  Real, unmodified ``nn.DataParallel``, ``DistributedDataParallel``,
optimizers and models run on them; results are exact, memory is accounted byte for byte, and time is
simulated from the recorded operations.
"""

from __future__ import annotations

import os

import torch

from labutils.virtual.state import MOST_DEVICES, state

DEFAULT_PROFILE = "A100-SXM4-80GB"


def enable(
    devices: int = 4, *, profile: str = DEFAULT_PROFILE, compute: str = "real"
) -> list[torch.device]:
    """Have ``devices`` virtual GPUs in this process.

    May be called again, to change number, kind or compute; tensors made before stay where they are.

    Args:
        devices: 1 to 64.
        profile: the GPU (or system) to imitate: memory, speed and links; see ``lab.profiles()``.
        compute: "real" computes values on the CPU; "phantom" has shapes, memory and time only, so
            that models of any size run in a second or two.

    Returns:
        The devices, ``[device(type='vgpu', index=0), …]``.

    Raises:
        ValueError: the number is out of range, or profile or compute is unknown.
    """
    from labutils.timing import profiles
    from labutils.virtual import device as registration

    if isinstance(devices, bool) or not isinstance(devices, int):
        raise ValueError(f"The number of virtual GPUs must be an integer, but got {devices!r}.")
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(
            f"{devices} virtual GPUs cannot be made: choose a number from 1 to {MOST_DEVICES}."
        )
    if not isinstance(profile, str | os.PathLike):
        raise ValueError(f"profile must be the name of one, or a file, but got {profile!r}.")
    if compute not in ("real", "phantom"):
        raise ValueError(f"compute must be 'real' or 'phantom', but got {compute!r}.")
    gpu = profiles.load(profile).gpu
    state.ledger.closed = ""
    state.ledger.resize(devices, gpu.memory_bytes)
    state.gpu_name, state.multi_processor_count = gpu.name, gpu.multi_processor_count
    state.profile, state.phantom, state.devices = profile, compute == "phantom", devices
    registration.register()
    return [torch.device("vgpu", i) for i in range(devices)]


def disable() -> None:
    """Have no virtual GPUs any more; tensors on them stay readable."""
    state.devices = 0


def is_enabled() -> bool:
    """Whether this process has virtual GPUs."""
    return state.devices > 0


def is_phantom() -> bool:
    """Whether tensors have no values (compute="phantom")."""
    return state.phantom


__all__ = ["DEFAULT_PROFILE", "MOST_DEVICES", "disable", "enable", "is_enabled", "is_phantom"]
