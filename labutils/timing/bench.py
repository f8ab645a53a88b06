"""Recording one training step of real PyTorch on phantom GPUs.

The step is that of a model alone, in ``nn.DataParallel``, or in ``DistributedDataParallel`` as one
rank of several.  DDP is recorded with a bucket of its own for every parameter, so that each
all-reduce in the log stands where that parameter's gradient is ready; :mod:`labutils.timing.ddp`
joins them to buckets of any size.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from labutils.models import ModelSpec
from labutils.timing.recording import Recording, Setting, nbytes
from labutils.timing.recurrent import goes_by_steps, join_steps
from labutils.virtual import errors, journal
from labutils.virtual.alone import LoneGroup, isolated
from labutils.virtual.state import state

DTYPES = {"amp": torch.float16, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Element type of each precision that has one of its own."""

WARM_UP = 2
"""Steps before the recorded one: DDP rebuilds its buckets in the second, optimizers make their
state at the end of the first."""
GPU = "vgpu:0"
WITHOUT_VALUES = (
    "A prediction cannot take a model whose control flow, shapes or loss depend on values."
)


def record(spec: ModelSpec, setting: Setting) -> Recording:
    """Run ``WARM_UP`` steps and record the next one.

    Raises:
        ValueError: the step fails; the message says in which module, and why.
    """
    with isolated(setting.gpus if setting.strategy == "dp" else 1):
        bench = _Bench(spec, setting)
        try:
            with bench.place.explained():
                return bench.run()
        finally:
            bench.clear()


class _Bench:
    """A model on a phantom GPU, ready to be trained."""

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        self.spec, self.setting = spec, setting
        self.place = _Place(spec.name)
        self.inputs, self.targets = self._batch()
        with self.place.explained():
            self.model = self._model()
            self.place.follow(self.model)
            self.wrapped = self._wrap()
            self.optimizer = spec.optimizer(self.model.parameters())
        self.held: list[Any] = []
        """The batch on the GPU, which a training loop's variables keep until the next one."""
        self.ready: list[tuple[int, int]] = []
        """(log number, bytes) of every gradient that came to be."""

    def run(self) -> Recording:
        recorder, ledger = state.recorder, state.ledger
        for _ in range(WARM_UP):
            self._step([], 1)
        self._count_gradients()
        count = len(ledger.allocated)
        for index in range(count):
            journal.sample_memory(index)
        start, allocated = recorder.count, tuple(ledger.allocated)
        cuts: list[int] = []
        before = ledger.peak[0]
        self._step(cuts, 3 if self.setting.accumulates else 1)
        for index in range(count):
            journal.sample_memory(index)
        recorder.host()
        entries, _ = recorder.since(start)
        cuts = [cut - start for cut in cuts]
        parts = [entries[a:b] for a, b in zip([0, *cuts], [*cuts, len(entries)], strict=True)]
        modules = self.model.modules()
        return Recording(
            micro=tuple(parts[:-1]),
            last=parts[-1],
            allocated=allocated,
            lasting=self._lasting(),
            ready=() if self._views() else tuple((n - start, b) for n, b in self.ready),
            before=before,
            others=tuple(ledger.peak[1:]),
            gradients=self._bucket_order(),
            samples=self.setting.batch,
            first=start,
            stepwise=tuple(sorted({type(m).__name__ for m in modules if goes_by_steps(m)})),
        )

    def clear(self) -> None:
        """Let go of everything while the phantom GPUs are still there."""
        self.__dict__.clear()
        gc.collect()

    # -------------------------------------------------------------------------------- the program

    def _step(self, cuts: list[int], passes: int) -> None:
        """One step; ``cuts`` gets the log number at the end of every pass but the last."""
        self.optimizer.zero_grad()
        for n in range(passes):
            last = n == passes - 1
            with nullcontext() if last else self._no_sync():
                self._pass()
            if not last:
                cuts.append(state.recorder.count)
        self._update()

    def _pass(self) -> None:
        """Forward and backward of one batch, which is copied from pinned memory."""
        parallel = self.setting.strategy == "dp"
        inputs = self.inputs if parallel else tuple(_copy(t) for t in self.inputs)
        targets = _copy(self.targets)
        self.held = [inputs, targets]  # in place of those of the pass before
        amp = self.setting.precision == "amp"
        with torch.autocast("vgpu", DTYPES["amp"]) if amp else nullcontext():
            loss = self.spec.loss(self.wrapped, inputs, targets)
        if amp:
            loss = loss * self.scale
        loss.backward()

    def _update(self) -> None:
        """The optimizer's step; with "amp" as ``GradScaler`` makes it, which reads a flag."""
        if self.setting.precision == "amp":
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            found = torch.zeros((), device=GPU)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self.scale)
            journal.note("sync", 0)
        self.optimizer.step()

    def _no_sync(self) -> Any:
        return self.wrapped.no_sync() if self.setting.strategy == "ddp" else nullcontext()

    # ------------------------------------------------------------------------------- preparations

    def _batch(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        setting = self.setting
        inputs, targets = self.spec.batch(setting.batch, setting.seq, device="meta")
        return tuple(_host(t, self._dtype()) for t in inputs), _host(targets, self._dtype())

    def _dtype(self) -> torch.dtype | None:
        return (
            DTYPES[self.setting.precision] if self.setting.precision in ("bf16", "fp16") else None
        )

    def _model(self) -> nn.Module:
        with torch.device("meta"):
            model = self.spec.build()
        model = phantom(model, self._dtype())
        join_steps(model)
        return model.train()

    def _wrap(self) -> Any:
        setting = self.setting
        if setting.precision == "amp":
            self.scale = torch.zeros((), device=GPU)
        if setting.strategy == "single":
            return self.model
        if setting.strategy == "dp":
            return nn.DataParallel(self.model, device_ids=list(range(setting.gpus)))
        return nn.parallel.DistributedDataParallel(
            self.model,
            device_ids=[0],
            process_group=LoneGroup(2),
            bucket_cap_mb=0,  # a bucket for every parameter
            gradient_as_bucket_view=setting.gradient_as_bucket_view,
            find_unused_parameters=setting.find_unused_parameters,
        )

    # ------------------------------------------------------------------------------------ results

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _count_gradients(self) -> None:
        seen: set[int] = set()

        def note(parameter: torch.Tensor) -> None:
            if id(parameter) not in seen:  # later ones are added to what is there
                seen.add(id(parameter))
                self.ready.append((state.recorder.count, nbytes(parameter)))

        for parameter in self._parameters():
            parameter.register_post_accumulate_grad_hook(note)

    def _views(self) -> bool:
        return self.setting.strategy == "ddp" and self.setting.gradient_as_bucket_view

    def _lasting(self) -> dict[str, int]:
        tensors = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        ddp = self.setting.strategy == "ddp"
        return {
            "parameters": sum(map(nbytes, tensors.values())),
            "buckets": sum(map(nbytes, self._parameters())) if ddp else 0,
            "optimizer": sum(map(nbytes, _state_tensors(self.optimizer))),
        }

    def _bucket_order(self) -> tuple[torch.Tensor, ...]:
        """In the order of readiness once DDP has rebuilt its buckets; it does not while it looks
        for unused parameters."""
        if self.setting.strategy != "ddp":
            return ()
        found: list[torch.Tensor] = list(self._parameters()[::-1])
        if not self.setting.find_unused_parameters:
            buckets = self.wrapped.reducer._get_zeros_like_grad_buckets()
            order = [p for bucket in buckets for p in bucket.parameters()]
            found = order if len(order) == len(found) else found
        return tuple(torch.empty(p.shape, dtype=p.dtype, device="meta") for p in found)


def phantom(model: nn.Module, dtype: torch.dtype | None = None, device: str = GPU) -> nn.Module:
    """A copy of ``model`` with its parameters and buffers on phantom GPU 0, none of them copied.

    Args:
        dtype: element type of its floating-point tensors; as they are if None.
        device: another place without values, such as "meta".
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        made = torch.empty(tensor.shape, dtype=kind, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copy.deepcopy(model, memo)


class _Place:
    """Where in the model the program is, for the message when it fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stack: list[str] = []

    def follow(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            text = f"module {name!r} ({type(module).__name__})" if name else ""
            module.register_forward_pre_hook(lambda *_, text=text: self.stack.append(text))
            module.register_forward_hook(self._leave)

    def _leave(self, *_: object) -> None:
        if self.stack:  # the replicas of DataParallel share it
            self.stack.pop()

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            inner = next((place for place in reversed(self.stack) if place), "")
            where = f" in {inner}" if inner else ""
            text = str(error).strip()
            if "Original Traceback" in text:  # of a thread of DataParallel; its last line says why
                text = text.splitlines()[-1].partition(": ")[2]
            text = text.replace(errors.WITH_VALUES, WITHOUT_VALUES)
            why = " ".join(text.split()).rstrip(".") or type(error).__name__
            raise ValueError(f"The step of {self.name} fails{where}: {why}.") from error


def _host(like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in pinned host memory that takes up none."""
    kind = dtype if dtype and like.is_floating_point() else like.dtype
    made = torch.empty((), dtype=kind).expand(like.shape)
    made.untyped_storage()._vgpu_pinned = True  # type: ignore[attr-defined]
    return made


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(GPU, non_blocking=True)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [v for entry in optimizer.state.values() for v in entry.values()]
    return [v for v in values if isinstance(v, torch.Tensor) and v.device.type == "vgpu"]


__all__ = ["phantom", "record"]
