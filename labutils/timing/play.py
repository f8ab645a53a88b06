"""Playing a recorded step as one rank of many, and what that tells."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..trace import Span, Trace
from ..virtual.memory import size
from ..virtual.record import Entry
from . import ddp
from .cost import Costs
from .profiles import Gpu, Profile
from .recording import CATEGORIES, Recording
from .schedule import Scheduler


@dataclass
class Prediction:
    """What one training step costs.  Memory and trace are those of the fullest GPU, GPU 0."""

    step_s: float
    """Seconds per optimizer step, ``accumulate`` passes included."""
    samples_per_s: float
    """Samples per second of all GPUs together."""
    efficiency: float
    """Speed per GPU, as a share of what one GPU alone does with the same samples per pass."""
    exposed_communication_s: float
    """Seconds of the step in which a GPU communicates and computes nothing."""
    memory_bytes: dict[str, int]
    """Per GPU: parameters (with buffers), gradients, buckets, optimizer, activations (all else),
    as they are where the most is allocated; ``peak`` is their sum."""
    fits: bool
    """Whether the peak is within the GPU's memory.  If not, the times are what they would be."""
    trace: Trace
    buckets: list[int] = field(default_factory=list)
    """Bytes of each of DDP's buckets, in the order in which they are reduced."""
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the trace, ready for JSON."""
        keys = [f.name for f in dataclasses.fields(self) if f.name != "trace"]
        return {key: getattr(self, key) for key in keys}

    def __repr__(self) -> str:
        peak = size(self.memory_bytes["peak"])
        fits = "" if self.fits else ", which does not fit"
        return (
            f"{self.step_s * 1e3:.1f} ms a step, {self.samples_per_s:,.0f} samples/s, efficiency "
            f"{self.efficiency:.0%}, {self.exposed_communication_s * 1e3:.1f} ms of communication "
            f"exposed, {peak} per GPU{fits}"
        )


def steps(
    recording: Recording, accumulate: int = 1, groups: Sequence[ddp.Group] = ()
) -> list[Entry]:
    """The entries of a step of so many passes, with DDP's buckets ``groups``."""
    made = []
    if accumulate > 1:
        first, other = recording.micro
        made = [*first, *(other * (accumulate - 2))]
    return made + (ddp.regroup(recording.last, groups) if groups else recording.last)


def play(
    recording: Recording,
    entries: list[Entry],
    profile: Profile,
    ranks: int = 1,
    per_node: int | None = None,
    costs: Costs | None = None,
) -> Trace:
    """The trace of ``entries``, made from a recording, as one of so many ``ranks`` has it."""
    devices = len(recording.allocated)
    capacity = (profile.gpu.memory_bytes,) * devices
    player = Scheduler(
        profile, devices, recording.allocated, capacity, recording.first, per_node=per_node,
        costs=costs,
    )  # fmt: skip
    player.feed(ddp.spread(entries, ranks) if devices == 1 else entries)
    player.finish()
    return player.trace()


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector, which would go through the growing list of spans again and
    again; halves the time of a long step, and leaves nothing behind, since there are no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def exposed(trace: Trace, device: str = "GPU 0") -> float:
    """Seconds in which ``device`` communicates and does not compute."""
    own = [s for s in trace.spans if s.device == device and s.lane != "copy"]
    computing = [(s.start, s.end) for s in own if s.lane != "communication"]
    return union([(s.start, s.end) for s in own]) - union(computing)


def union(intervals: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def behind_loader(trace: Trace, idle: float) -> Trace:
    """The step behind ``idle`` seconds of waiting for its batch."""
    if idle <= 0:
        return trace
    spans = [dataclasses.replace(s, start=s.start + idle, end=s.end + idle) for s in trace.spans]
    wait = Span("wait for data", 0.0, idle, "host", "main", "data")
    memory = [dataclasses.replace(m, time=m.time + idle if m.time else 0.0) for m in trace.memory]
    return dataclasses.replace(trace, spans=[wait, *spans], memory=memory)


def notes(
    recording: Recording, memory: dict[str, int], profile: Profile, precision: str, idle: float
) -> list[str]:
    """What a reader of the prediction has to know, a sentence each."""
    found = []
    capacity = profile.gpu.memory_bytes
    if memory["peak"] > capacity:
        parts = ", ".join(f"{name} {size(memory[name])}" for name in CATEGORIES if memory[name])
        found.append(
            f"Out of memory: each GPU would hold {size(memory['peak'])} ({parts}), but a "
            f"{profile.gpu.name} has {size(capacity)}."
        )
    found += lacking(precision, profile.gpu)
    if recording.stepwise:
        found.append(
            f"{' and '.join(recording.stepwise)} layers are played step by step, one kernel after "
            "another; cuDNN joins the steps, so a real GPU takes less time there."
        )
    if recording.others:
        found.append(f"The GPUs after GPU 0 hold at most {size(max(recording.others))}.")
    if idle:
        found.append(f"The GPUs wait {idle * 1e3:.3g} ms a step for data.")
    return found


def lacking(precision: str, gpu: Gpu) -> list[str]:
    """What the GPU has no units for, by its own table of peaks; nothing where it has them."""
    dtype = {"fp32": "float32", "tf32": "tfloat32", "bf16": "bfloat16"}.get(precision, "float16")
    if dtype not in gpu.peak:
        return [
            f"A {gpu.name} has no {precision} units: matrix products and convolutions take as long "
            "as in fp32."
        ]
    if dtype not in gpu.tensor and dtype != "float32":
        return [
            f"A {gpu.name} has no tensor cores for {precision}: matrix products and convolutions "
            f"run on its ordinary cores, {gpu.peak[dtype] / gpu.peak['float32']:.3g} times as fast "
            "as in fp32 at best."
        ]
    return []


__all__ = [
    "Prediction", "behind_loader", "exposed", "lacking", "notes", "play", "steps", "uncollected",
]  # fmt: skip
