"""Virtual GPUs: PyTorch devices ``vgpu:0 … vgpu:N-1`` in plain Python, on any machine.

``enable(4)`` makes four.  Real, unmodified ``nn.DataParallel``, ``DistributedDataParallel``,
optimizers and models run on them; results are exact, memory is accounted byte for byte, and time is
simulated from the recorded operations.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from labutils.virtual.state import MOST_DEVICES, state

if TYPE_CHECKING:
    from labutils.timing.profiles import Profile

DEFAULT_PROFILE = "A100-SXM4-80GB"


def enable(
    devices: int = 4,
    *,
    profile: str = DEFAULT_PROFILE,
    compute: str | None = None,
    pace: str = "simulated",
) -> list[torch.device]:
    """Have ``devices`` virtual GPUs in this process.

    May be called again, to change number, kind, compute or pace; tensors made before stay where
    they are.

    Args:
        devices: 1 to 64.
        profile: the GPU (or system) to imitate: memory, speed and links; see ``lab.profiles()``.
        compute: "real" computes values on the CPU; "phantom" has shapes, memory and time only, so
            that models of any size run in a second or two.  By default "real", and "phantom" with
            ``pace="wall"``.
        pace: "simulated" lets the program run as fast as it can, and works out from the record of
            its operations when a GPU would have done them.  "wall" makes the devices busy in real
            time, for as long as the profile says and without using the CPU: launches and
            non-blocking copies from pinned memory return at once; ``synchronize``, ``.item()``,
            ``.cpu()`` and copies from pageable memory wait.  There are no values, so what is read
            is nan.

    Returns:
        The devices, ``[device(type='vgpu', index=0), …]``.

    Raises:
        ValueError: the number is out of range, profile, compute or pace is unknown, or real compute
            is asked for in real time.
    """
    from labutils.timing import profiles
    from labutils.virtual import device as registration
    from labutils.virtual import limits

    if isinstance(devices, bool) or not isinstance(devices, int):
        raise ValueError(f"The number of virtual GPUs must be an integer, but got {devices!r}.")
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(
            f"{devices} virtual GPUs cannot be made: choose a number from 1 to {MOST_DEVICES}."
        )
    if not isinstance(profile, str | os.PathLike):
        raise ValueError(f"profile must be the name of one, or a file, but got {profile!r}.")
    compute = _check_compute(compute, pace)
    loaded = profiles.load(profile)
    gpu = loaded.gpu
    state.ledger.closed = ""
    state.ledger.resize(devices, gpu.memory_bytes)
    state.gpu_name, state.multi_processor_count = gpu.name, gpu.multi_processor_count
    state.profile, state.phantom, state.devices = profile, compute == "phantom", devices
    registration.register()
    limits.run_eagerly(True)
    _set_pace(loaded if pace == "wall" else None)
    return [torch.device("vgpu", i) for i in range(devices)]


def disable() -> None:
    """Have no virtual GPUs any more; tensors on them stay readable."""
    if state.devices:
        from labutils.virtual import limits

        limits.run_eagerly(False)
    state.devices = 0
    _set_pace(None)


def is_enabled() -> bool:
    """Whether this process has virtual GPUs."""
    return state.devices > 0


def is_phantom() -> bool:
    """Whether tensors have no values (compute="phantom")."""
    return state.phantom


def is_wall() -> bool:
    """Whether the devices are busy in real time (pace="wall")."""
    return state.recorder.pacer is not None


def _check_compute(compute: str | None, pace: str) -> str:
    """What ``compute`` means with ``pace``."""
    if pace not in ("simulated", "wall"):
        raise ValueError(f"pace must be 'simulated' or 'wall', but got {pace!r}.")
    if compute is None:
        return "phantom" if pace == "wall" else "real"
    if compute not in ("real", "phantom"):
        raise ValueError(f"compute must be 'real' or 'phantom', but got {compute!r}.")
    if pace == "wall" and compute == "real":
        raise ValueError(
            "pace='wall' needs compute='phantom': with compute='real' the CPU does the work, in "
            "its own time and not in the GPU's."
        )
    return compute


def _set_pace(profile: Profile | None) -> None:
    """Let the devices run in real time as those of ``profile``, or not at all if None."""
    if profile is None:
        state.recorder.pacer = None
        return
    from labutils.virtual import journal, wall

    for index in range(len(state.ledger.allocated)):
        journal.sample_memory(index)
    state.recorder.pacer = wall.Pacer(profile, state.ledger.allocated)


__all__ = [
    "DEFAULT_PROFILE",
    "MOST_DEVICES",
    "disable",
    "enable",
    "is_enabled",
    "is_phantom",
    "is_wall",
]
