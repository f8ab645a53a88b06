"""``lab.predict``: how long a training step takes on hardware that is not here, and whether it fits.

One step of the model is recorded on a phantom GPU (:mod:`labutils.timing.recording`) and played on
the profile.  All ranks of a data-parallel run do the same, so one of them is played, with its
collectives as long as they take over all; 1,024 GPUs cost no more to predict than two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..models import ModelSpec
from ..models.spec import MakeOptimizer
from ..trace import Span, Trace
from ..virtual.memory import size
from ..virtual.record import Entry
from . import ddp, library, profiles
from .profiles import Profile
from .recording import CATEGORIES, Recording, Setting
from .schedule import Scheduler
from .tables import unknown

STRATEGIES = ("single", "dp", "ddp")
PRECISIONS = ("fp32", "tf32", "amp", "bf16", "fp16")
Example = tuple[Tensor | tuple[Tensor, ...], Tensor]


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


def predict(
    model: str | ModelSpec | nn.Module,
    batch: int = 32,
    strategy: str = "ddp",
    gpus: int = 1,
    nodes: int = 1,
    profile: str = "A100-SXM4-80GB",
    fabric: str | None = None,
    precision: str = "fp32",
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    gradient_as_bucket_view: bool = False,
    find_unused_parameters: bool = False,
    accumulate: int = 1,
    loader: float | str | None = None,
    seq: int | None = None,
    example: Example | None = None,
    criterion: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    optimizer: MakeOptimizer | None = None,
) -> Prediction:
    """Predict one training step in the steady state.

    Args:
        model: a name of ``lab.models.names()``, a ``ModelSpec``, or a module of yours, which needs
            an ``example`` batch ``(inputs, targets)`` of any size and its ``criterion``.
        batch: samples per pass and GPU; of all GPUs together for "dp".
        strategy: "single", "dp" (``nn.DataParallel``) or "ddp" (``DistributedDataParallel``).
        gpus: GPUs per node, which may be fewer than the system has.
        profile: a system, a kind of GPU, or the path of a TOML file; see ``lab.profiles``.
        fabric: what connects the nodes; the system's own if None.
        precision: "fp32" as PyTorch has it by default, which allows TF32 in convolutions; "tf32"
            allows it in matrix products too; "amp" is autocast to float16 with a loss scale; "bf16"
            and "fp16" have all tensors in that type.
        bucket_cap_mb, first_bucket_mb: DDP's buckets, in MiB.  DDP itself has a small first bucket
            only where no ``bucket_cap_mb`` is passed to it; otherwise both are the same.
        accumulate: passes per step; all but the last are under ``no_sync``.
        loader: how fast each process gets its batches: seconds per batch, or a text such as
            "1200/s" for samples per second.  Loading runs beside the step, one batch ahead.
        seq: tokens per sample of a language model.
        optimizer: makes the optimizer from the parameters; the model's usual one if None.

    Raises:
        ValueError: an unknown name or impossible number, several nodes without a fabric, or a
            model whose step fails.
    """
    chosen = _profile(profile, fabric, precision)
    _check(strategy, precision, dict(batch=batch, gpus=gpus, nodes=nodes, accumulate=accumulate))
    _check_place(strategy, gpus, nodes, batch, chosen)
    if not bucket_cap_mb >= 0 or not first_bucket_mb >= 0:
        raise ValueError(
            f"Buckets have 0 MiB or more, but bucket_cap_mb is {bucket_cap_mb!r} and "
            f"first_bucket_mb {first_bucket_mb!r}."
        )
    source = library.source(model, example, criterion, optimizer)
    setting = Setting(
        strategy=strategy, batch=batch, seq=seq, accumulate=min(accumulate, 3),
        precision="fp32" if precision == "tf32" else precision,
        gpus=gpus if strategy == "dp" else 1,
        gradient_as_bucket_view=strategy == "ddp" and gradient_as_bucket_view,
        find_unused_parameters=strategy == "ddp" and find_unused_parameters,
    )  # fmt: skip
    recording = library.recording(source, setting)
    alone = dataclasses.replace(
        setting, strategy="single", gpus=1, gradient_as_bucket_view=False,
        find_unused_parameters=False, batch=-(-batch // gpus) if strategy == "dp" else batch,
    )  # fmt: skip
    single = library.recording(source, alone)
    groups: list[ddp.Group] = []
    if strategy == "ddp":
        groups = ddp.buckets(
            recording.gradients, bucket_cap_mb, first_bucket_mb, not find_unused_parameters
        )
    wait = _seconds_per_batch(loader, batch)
    trace = play(recording, chosen, accumulate, groups, gpus * nodes, gpus)
    step = trace.duration
    trace = _with_loader(trace, wait * accumulate - step)
    samples = batch * accumulate * (1 if strategy == "dp" else gpus * nodes)
    lone = play(single, chosen, accumulate).duration
    return Prediction(
        step_s=trace.duration,
        samples_per_s=samples / trace.duration,
        efficiency=samples / trace.duration / (gpus * nodes * single.samples * accumulate / lone),
        exposed_communication_s=exposed(trace),
        memory_bytes=dict(recording.memory),
        fits=recording.memory["peak"] <= chosen.gpu.memory_bytes,
        trace=trace,
        buckets=[sum(_bytes(recording.gradients[i]) for i in group) for group in groups],
        notes=_notes(recording, chosen, max(0.0, wait * accumulate - step)),
    )


def play(
    recording: Recording,
    profile: Profile,
    accumulate: int = 1,
    groups: Sequence[ddp.Group] = (),
    world: int = 1,
    per_node: int | None = None,
) -> Trace:
    """The trace of a recorded step with DDP's buckets ``groups``, over ``world`` ranks."""
    last = ddp.regroup(recording.last, groups) if groups else recording.last
    entries = [*_passes(recording, accumulate), *last]
    if groups:
        entries = ddp.spread(entries, world)
    devices = len(recording.allocated)
    capacity = (profile.gpu.memory_bytes,) * devices
    player = Scheduler(
        profile, devices, recording.allocated, capacity, recording.first, per_node=per_node
    )
    player.feed(entries)
    player.finish()
    return player.trace()


def exposed(trace: Trace, device: str = "GPU 0") -> float:
    """Seconds in which ``device`` communicates and does not compute."""
    both = [s for s in trace.spans if s.device == device and s.lane != "copy"]
    one = [dataclasses.replace(s, lane="either") for s in both]
    joined = dataclasses.replace(trace, spans=one)
    computing = [dataclasses.replace(s, lane="either") for s in both if s.lane != "communication"]
    alone = dataclasses.replace(trace, spans=computing)
    return joined.busy(device, "either") - alone.busy(device, "either")


def _passes(recording: Recording, accumulate: int) -> list[Entry]:
    """The passes before the last; the second stands for all after it."""
    first, others = recording.micro[:1], recording.micro[1:]
    made = [entry for part in first for entry in part]
    for _ in range(accumulate - 2):
        made += [entry for part in others for entry in part]
    return made


def _with_loader(trace: Trace, idle: float) -> Trace:
    """The step behind ``idle`` seconds of waiting for its batch."""
    if idle <= 0:
        return trace
    spans = [dataclasses.replace(s, start=s.start + idle, end=s.end + idle) for s in trace.spans]
    wait = Span("wait for data", 0.0, idle, "host", "main", "data")
    memory = [dataclasses.replace(m, time=m.time + idle if m.time else 0.0) for m in trace.memory]
    return dataclasses.replace(trace, spans=[wait, *spans], memory=memory)


def _notes(recording: Recording, profile: Profile, idle: float) -> list[str]:
    notes = []
    memory, capacity = recording.memory, profile.gpu.memory_bytes
    if memory["peak"] > capacity:
        parts = ", ".join(f"{name} {size(memory[name])}" for name in CATEGORIES if memory[name])
        notes.append(
            f"Out of memory: each GPU would hold {size(memory['peak'])} ({parts}), but a "
            f"{profile.gpu.name} has {size(capacity)}."
        )
    if recording.others:
        notes.append(f"The GPUs after GPU 0 hold at most {size(max(recording.others))}.")
    if idle:
        notes.append(f"The GPUs wait {idle * 1e3:.3g} ms a step for data.")
    return notes


# ------------------------------------------------------------------------------- what is asked for


def _profile(name: str, fabric: str | None, precision: str) -> Profile:
    chosen = profiles.load(name, fabric)
    if precision == "tf32":
        chosen = dataclasses.replace(chosen, tf32=frozenset({"conv", "gemm", "attention"}))
    return chosen


def _check(strategy: str, precision: str, counts: dict[str, Any]) -> None:
    for what, value, known in (
        ("strategy", strategy, STRATEGIES), ("precision", precision, PRECISIONS)
    ):  # fmt: skip
        if value not in known:
            raise ValueError(unknown(what, str(value), list(known)))
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, but is {value!r}.")


def _check_place(strategy: str, gpus: int, nodes: int, batch: int, profile: Profile) -> None:
    if strategy != "ddp" and nodes > 1:
        raise ValueError(f"{strategy!r} runs in one process: nodes must be 1, but is {nodes}.")
    if strategy == "single" and gpus > 1:
        raise ValueError(f"'single' uses one GPU, but gpus is {gpus}: choose 'ddp' or 'dp'.")
    if gpus > profile.gpus:
        raise ValueError(
            f"A node of {profile.name} has {profile.gpus} GPUs, but gpus is {gpus}: add nodes."
        )
    if strategy == "dp" and batch < gpus:
        raise ValueError(f"'dp' divides the batch: {batch} samples do not reach {gpus} GPUs.")
    if nodes > 1 and profile.fabric is None:
        known = ", ".join(profiles.fabrics())
        raise ValueError(f"{nodes} nodes need a fabric between them: choose one of {known}.")


def _seconds_per_batch(loader: float | str | None, batch: int) -> float:
    if loader is None:
        return 0.0
    try:
        rate = isinstance(loader, str) and loader.endswith("/s")
        value = float(str(loader).removesuffix("/s"))
        if not 0 < value < 1e12:
            raise ValueError
        return batch / value if rate else value
    except ValueError:
        raise ValueError(
            f"loader is {loader!r}, but must be seconds per batch, e.g. 0.05, or a text such as "
            "'1200/s' for samples per second."
        ) from None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


__all__ = ["PRECISIONS", "STRATEGIES", "Prediction", "exposed", "play", "predict"]
