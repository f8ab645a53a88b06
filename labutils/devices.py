"""The GPUs that a notebook works with: real ones where there are enough, else virtual ones."""

from __future__ import annotations

import torch

from labutils import virtual


def gpus(
    count: int = 4,
    *,
    profile: str = virtual.DEFAULT_PROFILE,
    compute: str | None = None,
    pace: str = "simulated",
) -> list[torch.device]:
    """``count`` GPUs to work with.

    Args:
        count: how many, 1 to 64.
        profile, compute, pace: what virtual GPUs imitate, see :func:`labutils.virtual.enable`.

    Returns:
        ``[device('cuda:0'), …]`` where there are that many, else ``[device('vgpu:0'), …]``.  With
        ``compute="phantom"`` they are always virtual.

    Raises:
        ValueError: ``count`` is out of range, or profile, compute or pace is unknown.
    """
    valid = isinstance(count, int) and not isinstance(count, bool)
    if not valid or not 1 <= count <= virtual.MOST_DEVICES:
        raise ValueError(
            f"lab.gpus({count!r}) asks for no possible number of GPUs: choose a whole number from "
            f"1 to {virtual.MOST_DEVICES}."
        )
    if compute in (None, "real") and torch.cuda.device_count() >= count:
        virtual.disable()
        return [torch.device("cuda", i) for i in range(count)]
    return virtual.enable(count, profile=profile, compute=compute, pace=pace)


def in_use(count: int) -> list[torch.device]:
    """At most ``count`` of the GPUs that this process works with, real or virtual, as they are.

    Where it works with none yet, it does with four afterwards (or ``count``, if that is more).
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.device_count():
        return gpus(max(count, 4))[:count]
    there = min(count, torch.accelerator.device_count())
    return [torch.device(accelerator.type, i) for i in range(there)]


def describe(devices: list[torch.device]) -> str:
    """One sentence on what ``devices`` are, and what of their figures is measured."""
    if devices[0].type != "vgpu":
        names = ", ".join(sorted({torch.cuda.get_device_name(d) for d in devices}))
        return f"{len(devices)} real GPUs ({names}): values, memory and time are measured"
    gpu = torch.get_device_module("vgpu").get_device_properties(0)
    values = "none computed" if virtual.is_phantom() else "exact"
    pace = ", passing in real time" if virtual.is_wall() else ""
    return (
        f"{len(devices)} × {gpu.name} with {gpu.total_memory / 2**30:.1f} GiB each: "
        f"values {values}, memory counted, time simulated{pace}"
    )
