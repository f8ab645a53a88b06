"""``lab.predict``: how long a training step takes on other hardware, and whether it fits.

One step of the model is recorded on a phantom GPU (:mod:`labutils.timing.recording`) and played on
the profile.  All ranks of a data-parallel run do the same, so one of them is played, with its
collectives as long as they take over all; 1,024 GPUs cost no more to predict than two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..models import ModelSpec
from ..models.spec import MakeOptimizer
from ..trace import Trace
from ..virtual.record import Entry
from . import checks, ddp, library, profiles
from .cost import Costs
from .play import Prediction, behind_loader, exposed, notes, play, steps, uncollected
from .profiles import Profile
from .recording import Recording, Setting, memory_of, nbytes

STRATEGIES = ("single", "dp", "ddp")
PRECISIONS = ("fp32", "tf32", "amp", "bf16", "fp16")
WORLDS = tuple(2**n for n in range(11))
"""Numbers of GPUs of a scaling curve, 1 to 1,024."""

Example = tuple[Tensor | tuple[Tensor, ...], Tensor]


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
        gradient_as_bucket_view: gradients lie in the buckets, and are not copied back.  They are
            still copied in, since ``zero_grad`` sets them to None.
        accumulate: passes per step; all but the last are under ``no_sync``.
        loader: how fast each process gets its batches: seconds per batch, or a text such as
            "1200/s" for samples per second.  Loading runs beside the step, one batch ahead.
        seq: tokens per sample of a language model.
        optimizer: makes the optimizer from the parameters; the model's usual one if None.

    Raises:
        ValueError: an unknown name or impossible number, several nodes without a fabric, or a
            model whose step fails.
    """
    question = Question(
        model, batch, strategy, gpus, nodes, profile, fabric, precision, bucket_cap_mb,
        first_bucket_mb, gradient_as_bucket_view, find_unused_parameters, accumulate, loader, seq,
        example, criterion, optimizer,
    )  # fmt: skip
    return question.answer()


def scaling(model: Any, worlds: Sequence[int] = WORLDS, **asked: Any) -> list[tuple[int, float]]:
    """``(GPUs, samples per second)`` of DDP on so many GPUs, on as many nodes as they need.

    Args:
        asked: as for :func:`predict`; ``gpus`` is the GPUs of a full node, all by default.

    Raises:
        ValueError: as :func:`predict`.
    """
    checks.keywords("lab.scaling", asked, ARGUMENTS)
    return Question(model, **{"gpus": 1, **asked}).curve(worlds, asked.get("gpus"))


@dataclass(kw_only=False)
class Question:
    """What :func:`predict` was asked, checked and recorded; the arguments are the same."""

    model: str | ModelSpec | nn.Module
    batch: int = 32
    strategy: str = "ddp"
    gpus: int = 1
    nodes: int = 1
    profile: str = "A100-SXM4-80GB"
    fabric: str | None = None
    precision: str = "fp32"
    bucket_cap_mb: float = 25
    first_bucket_mb: float = 1
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    accumulate: int = 1
    loader: float | str | None = None
    seq: int | None = None
    example: Example | None = None
    criterion: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    optimizer: MakeOptimizer | None = None
    record: library.Recorder = library.recording

    def __post_init__(self) -> None:
        checks.counts(
            batch=self.batch, gpus=self.gpus, nodes=self.nodes, accumulate=self.accumulate,
            **({} if self.seq is None else {"seq": self.seq}),
        )  # fmt: skip
        checks.choice("strategy", self.strategy, STRATEGIES)
        checks.choice("precision", self.precision, PRECISIONS)
        checks.limits(bucket_cap_mb=self.bucket_cap_mb, first_bucket_mb=self.first_bucket_mb)
        self.hardware = _profile(self.profile, self.fabric, self.precision)
        checks.place(self.strategy, self.gpus, self.nodes, self.batch, self.hardware)
        self.wait = checks.seconds_per_batch(self.loader, self.batch) * self.accumulate
        source = library.source(self.model, self.example, self.criterion, self.optimizer)
        self.name = source.spec.name
        self.recording = self.record(source, self._setting())
        self.single = self.record(source, self._alone())
        self.groups: list[ddp.Group] = []
        if self.strategy == "ddp":
            self.groups = ddp.buckets(
                self.recording.gradients, self.bucket_cap_mb, self.first_bucket_mb,
                not self.find_unused_parameters,
            )  # fmt: skip
        self.costs = Costs(self.hardware)
        self.entries = steps(self.recording, self.accumulate, self.groups)

    @uncollected()
    def answer(self) -> Prediction:
        """The prediction."""
        ranks = self.gpus * self.nodes
        trace = self._play(self.entries, ranks, self.gpus)
        idle = max(0.0, self.wait - trace.duration)
        trace = behind_loader(trace, idle)
        rate = self._samples(ranks) / trace.duration
        memory = memory_of(self.recording)
        tensors = self.recording.gradients
        return Prediction(
            step_s=trace.duration,
            samples_per_s=rate,
            efficiency=rate / ranks / self._rate_alone(),
            exposed_communication_s=exposed(trace),
            memory_bytes=memory,
            fits=memory["peak"] <= self.hardware.gpu.memory_bytes,
            trace=trace,
            buckets=[sum(nbytes(tensors[i]) for i in group) for group in self.groups],
            notes=notes(self.recording, memory, self.hardware, self.precision, idle),
        )

    @uncollected()
    def curve(
        self, worlds: Sequence[int] = WORLDS, per_node: int | None = None
    ) -> list[tuple[int, float]]:
        """Samples per second by number of GPUs; without a fabric, up to one node's."""
        checks.worlds(worlds)
        node = per_node or self.hardware.gpus
        last = [e for e in steps(self.recording, 1, self.groups) if e.what != "memory"]
        before = 0.0  # passes that communicate nothing take as long on any number of GPUs
        if self.accumulate > 1:
            before = self._seconds_alone(self.recording, self.groups)
            before -= self._play(last, 1, 1).duration
        found = []
        for world in sorted(worlds):
            if world > node and self.hardware.fabric is None:
                break
            duration = before + self._play(last, world, min(world, node)).duration
            found.append((world, self._samples(world) / max(duration, self.wait)))
        return found

    def _play(self, entries: list[Entry], ranks: int, per_node: int) -> Trace:
        return play(self.recording, entries, self.hardware, ranks, per_node, self.costs)

    def _samples(self, ranks: int) -> int:
        return self.batch * self.accumulate * (1 if self.strategy == "dp" else ranks)

    def _rate_alone(self) -> float:
        """Samples per second of one GPU that needs nobody and waits for no data."""
        duration = self._seconds_alone(self.single)
        return self.single.samples * self.accumulate / duration

    def _seconds_alone(self, recorded: Recording, groups: Sequence[ddp.Group] = ()) -> float:
        """A step on one GPU that needs nobody.

        Each pass between the third and the last takes as long as the one before it.
        """

        def seconds(passes: int) -> float:
            entries = [e for e in steps(recorded, passes, groups) if e.what != "memory"]
            return play(recorded, entries, self.hardware, costs=self.costs).duration

        duration, more = seconds(min(self.accumulate, 4)), max(0, self.accumulate - 4)
        return duration + more * (duration - seconds(3)) if more else duration

    def _setting(self) -> Setting:
        distributed = self.strategy == "ddp"
        return Setting(
            strategy=self.strategy, batch=self.batch, seq=self.seq,
            precision="fp32" if self.precision == "tf32" else self.precision,
            accumulates=self.accumulate > 1,
            gpus=self.gpus if self.strategy == "dp" else 1,
            gradient_as_bucket_view=distributed and self.gradient_as_bucket_view,
            find_unused_parameters=distributed and self.find_unused_parameters,
        )  # fmt: skip

    def _alone(self) -> Setting:
        share = -(-self.batch // self.gpus) if self.strategy == "dp" else self.batch
        return dataclasses.replace(
            self._setting(), strategy="single", gpus=1, batch=share,
            gradient_as_bucket_view=False, find_unused_parameters=False,
        )  # fmt: skip


ARGUMENTS = tuple(
    field.name
    for field in dataclasses.fields(Question)
    if field.name not in ("model", "strategy", "record")
)
"""What :func:`predict` may be asked of DDP, beside the model."""


def _profile(name: str, fabric: str | None, precision: str) -> Profile:
    chosen = profiles.load(name, fabric)
    if precision == "tf32":
        chosen = dataclasses.replace(chosen, tf32=frozenset({"conv", "gemm", "attention"}))
    return chosen


__all__ = [
    "ARGUMENTS", "PRECISIONS", "STRATEGIES", "WORLDS", "Prediction", "Question", "predict",
    "scaling",
]  # fmt: skip
