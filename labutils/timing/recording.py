"""One training step on phantom GPUs, recorded: what :mod:`labutils.timing.predict` plays.

A recording holds for every profile and every number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labutils.virtual.record import Entry

CATEGORIES = ("parameters", "gradients", "buckets", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A step in the steady state, cut into the parts between its ``zero_grad`` and its ``step``.

    ``micro`` has the passes whose gradients are accumulated before: the first one, and one that
    stands for all others.  ``last`` is the pass that synchronises, with the optimizer's step.
    """

    micro: tuple[list[Entry], ...]
    last: list[Entry]
    allocated: tuple[int, ...]
    """Bytes on each GPU where the step begins."""
    lasting: dict[str, int]
    """Bytes on GPU 0 that stay from step to step: parameters, buckets, optimizer."""
    ready: tuple[tuple[int, int], ...]
    """(position, bytes) of each gradient, where it comes to be; none where they lie in buckets."""
    before: int
    """The most bytes on GPU 0 before this step."""
    others: tuple[int, ...]
    """Peak bytes on the GPUs after GPU 0 (DataParallel)."""
    gradients: tuple[torch.Tensor, ...]
    """Meta tensors like the gradients, in the order in which DDP fills its buckets."""
    samples: int
    """Samples of one pass."""
    first: int
    """Log number of the first entry."""
    stepwise: tuple[str, ...] = ()
    """Kinds of recurrent layers that are recorded step by step; cuDNN joins the steps."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a recording depends on."""

    strategy: str = "single"
    batch: int
    seq: int | None = None
    precision: str = "fp32"
    accumulates: bool = False
    """Several passes a step."""
    gpus: int = 1
    """GPUs of DataParallel."""
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False


def memory_of(recording: Recording) -> dict[str, int]:
    """Bytes on GPU 0 by category where it is fullest; ``peak`` is their sum.

    "activations" is all that is not in the other categories: inputs, what backward needs, and
    temporary tensors.
    """
    most, where, held = recording.allocated[0], 0, recording.allocated[0]
    position = 0
    for part in (*recording.micro, recording.last):
        for entry in part:
            if entry.what == "memory" and entry.device == 0:
                held += entry.ref
                if held > most:
                    most, where = held, position
            position += 1
    peak = max(most, recording.before)
    lasting = recording.lasting
    gradients = sum(size for ready, size in recording.ready if ready <= where)
    found = {"parameters": lasting["parameters"], "gradients": gradients,
             "buckets": lasting["buckets"], "optimizer": lasting["optimizer"]}  # fmt: skip
    return {**found, "activations": peak - sum(found.values()), "peak": peak}


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of all its elements."""
    return tensor.numel() * tensor.element_size()


__all__ = ["CATEGORIES", "Recording", "Setting", "memory_of", "nbytes"]
