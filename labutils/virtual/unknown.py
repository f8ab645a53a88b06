"""What a program reads from virtual GPUs that compute no values.

In simulated pace reading is an error.  In real time the program waits as it would on a real GPU,
and gets nan, so that loops which read their loss keep running.
"""

from __future__ import annotations

import math
import os
import sys
import warnings

import torch

from labutils.virtual import errors
from labutils.virtual.state import state
from labutils.virtual.streams import current_stream_id


def check(what: str) -> None:
    """Say once that there are no values.

    Raises:
        RuntimeError: the devices are not in real time.
    """
    pacer = state.recorder.pacer
    if pacer is None:
        raise errors.no_values(what)
    if not pacer.warned:
        pacer.warned = True
        warnings.warn(
            "These virtual GPUs are busy in real time and compute no values: what is read from "
            "them is nan (in a tensor of integers 0, of a comparison False).",
            stacklevel=_depth_of_caller(),
        )


def _depth_of_caller() -> int:
    """How far up the program's own line is, above PyTorch's and this package's."""
    inside = tuple(os.path.dirname(m.__file__ or "") for m in (torch, sys.modules[__package__]))
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        depth, frame = depth + 1, frame.f_back
    return depth


def value(dtype: torch.dtype) -> float | bool:
    """What ``.item()`` gives: nan, which is known to be no result; comparisons come out false."""
    return False if dtype == torch.bool else math.nan


def land(target: torch.Tensor, device: int, *, later: bool) -> None:
    """Fill the CPU tensor ``target`` of a copy from ``device``: now, or once the host has waited
    for the copy."""

    def fill() -> None:
        floating = target.is_floating_point() or target.is_complex()
        with torch.no_grad():
            target.fill_(math.nan if floating else 0)

    pacer = state.recorder.pacer
    if later and pacer is not None:
        pacer.land(device, current_stream_id(device), fill)
    else:
        fill()
