"""Seeing how a rank trains: DDP, forward and backward passes, optimizer steps, checkpoints."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from labutils.inspection.clearing import ClearingObserver
from labutils.inspection.data import DataObserver
from labutils.inspection.facts import Facts, checksum, fingerprint, where, wrap

_ALL, _SOME = 64, 16
"""Optimizer steps of which each is looked at, and one in how many later."""
_MOST = 2000
"""Optimizer steps and losses that are kept; a longer run tells nothing new."""


_SHARDED = ("DTensor", "FlatParameter")
"""Parameters of which each rank holds another part by design."""


class TrainingObserver:
    """Writes down what training consists of."""

    def __init__(self, facts: Facts, data: DataObserver) -> None:
        self.facts, self.data, self.clearing = facts, data, ClearingObserver(facts)
        self.models: list[weakref.ref[DistributedDataParallel]] = []
        self.inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.inside = 0
        """How deep in DDP's forward pass, or in a backward pass, this process is."""
        self.open: list[dict[str, Any] | None] = []
        """Optimizer steps that have begun; an optimizer may be made of others."""
        self.new_step()

    def new_step(self) -> None:
        """Forget what belonged to the optimizer step that has just been made."""
        self.passes: list[list[bool]] = []  # per backward: synchronising when forward, backward
        self.forwards: list[bool] = []
        self.around: list[str] = []  # lines that called the module inside DDP
        self.inputs: list[int] = []
        self.reduced_by_hand = False

    def install(self) -> None:
        """Watch from now on, in this process."""
        self.clearing.install()
        register_module_forward_pre_hook(self._inner_forward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        wrap(DistributedDataParallel, "__init__", self._ddp_made)
        wrap(DistributedDataParallel, "forward", self._ddp_forward)
        wrap(nn.DataParallel, "__init__", self._dp_made)
        wrap(torch.optim.Optimizer, "__init__", self._optimizer_made)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch, "save", self._save)
        wrap(Join, "__enter__", self._join)
        wrap(dist, "destroy_process_group", self._destroyed)
        for name in ("all_reduce", "all_gather", "broadcast", "reduce", "all_gather_into_tensor"):
            wrap(dist, name, functools.partial(self._by_hand, name))

    def _optimizer_made(self, original: Callable[..., Any], *args: Any, **more: Any) -> None:
        original(*args, **more)
        self.facts.data["optimizers"] += 1

    def _dp_made(self, original: Callable[..., Any], dp: Any, *args: Any, **kwargs: Any) -> None:
        original(dp, *args, **kwargs)
        self.facts.add("splits", where=where(), gpus=len(dp.device_ids))

    def _ddp_made(self, original: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        self.models.append(weakref.ref(ddp))
        self.inner.add(ddp.module)
        names = [name for name, p in ddp.module.named_parameters() if p.requires_grad]
        self.facts.add(
            "models", where=where(), names=names, device=str(ddp.device),
            index=next((p.get_device() for p in ddp.parameters()), -1), forwards=0, before=[],
            gpus=torch.get_device_module(ddp.device).device_count() if ddp.device else 0,
            members=dist.get_process_group_ranks(ddp.process_group),
        )  # fmt: skip

    def _ddp_forward(
        self, original: Callable[..., Any], ddp: Any, *inputs: Any, **more: Any
    ) -> Any:  # fmt: skip
        number = next((n for n, ref in enumerate(self.models) if ref() is ddp), None)
        if number is not None and torch.is_grad_enabled() and ddp.training:
            self._note_forward(self.facts.data["models"][number], ddp, [*inputs, *more.values()])
        self._enter_forward()
        self.inside += 1
        try:
            return original(ddp, *inputs, **more)
        finally:
            self.inside -= 1
            self.facts.data["in_forward"], self.facts.changed = "", True

    def _enter_forward(self) -> None:
        """Write down where DDP's forward pass is called; it may never come back from there."""
        line = self.facts.data["in_forward"] = where()
        if line not in self.facts.data["forwards"]:
            self.facts.data["forwards"].append(line)
        self.facts.changed = True

    def _note_forward(self, fact: dict[str, Any], ddp: Any, inputs: list[Any]) -> None:
        fact["forwards"] += 1
        self.forwards.append(bool(ddp.require_backward_grad_sync))
        tensors = [t for t in inputs if isinstance(t, torch.Tensor) and not _phantom(t)]
        self.inputs += [checksum(t, 4096) for t in tensors[:1]]
        if not fact["before"]:
            fact["before"] = self._fingerprints(self._inside())

    def _inner_forward(self, module: nn.Module, _: Any) -> None:
        if module in self.inner and not self.inside and module.training and torch.is_grad_enabled():
            self.around.append(where())

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **more: Any) -> Any:
        if self.inside:  # of a checkpointed part, within the one that the user has called
            return original(tensors, *args, **more)
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        self.clearing.before_backward()
        self.inside += 1
        try:
            result = original(tensors, *args, **more)
        finally:
            self.inside -= 1
        self.clearing.remember()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not _phantom(loss):
            self._note_loss(getattr(loss, "raw", loss).item())
        flags = [bool(d.require_backward_grad_sync) for ref in self.models if (d := ref())]
        if self.forwards:
            self.passes.append([self.forwards[-1], all(flags)])
            if self.forwards[-1] and not all(flags) and len(self.facts.data["models"]) == 1:
                self.facts.add("unmatched_no_sync", where=where())
        return result

    def _note_loss(self, value: float) -> None:
        if len(self.facts.data["losses"]) < _MOST:
            self.facts.data["losses"].append(value)
            self.facts.changed = True

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.open.append(None if self.open else self._begun(optimizer))

    def _begun(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """What is known before a step; None once there have been enough."""
        parameters = self._trained(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        dense = [g for g in gradients if not g.is_sparse and not _phantom(g)]
        number = len(self.facts.data["steps"])
        if self.data.current is not None:
            self.data.current.fact["steps"] += 1
        if number >= _MOST:
            return None
        return self.facts.add(
            "steps", where=where(), before=self._fingerprints(parameters) if not number else None,
            optimizer=id(optimizer), none=not gradients,
            zero=all(not getattr(g, "raw", g).any() for g in dense) if dense else not gradients,
            gradients=[checksum(g) for g in dense] if _worth(number) else None,
            rate=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            passes=[*self.passes], around=[*self.around], inputs=[*self.inputs],
            forwards=len(self.forwards),
            by_hand=self.reduced_by_hand,
            sharded=any(type(p).__name__ in _SHARDED for p in parameters),
        )  # fmt: skip

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = self.open.pop()
        if step is None:
            return
        step["after"] = self._fingerprints(self._trained(optimizer)) if _worth(
            len(self.facts.data["steps"]) - 1
        ) else None  # fmt: skip
        self.clearing.after_step(optimizer)
        step["time"] = time.perf_counter()
        self.new_step()

    def _trained(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        """The parameters inside DDP, then those that only the optimizer has."""
        inside = self._inside()
        known = {id(p) for p in inside}
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        return inside + [p for p in mine if id(p) not in known and (p.requires_grad or not inside)]

    def _inside(self) -> list[torch.Tensor]:
        return [p for ref in self.models if (d := ref()) for p in d.parameters() if p.requires_grad]

    def _fingerprints(self, parameters: Sequence[torch.Tensor]) -> list[Any]:
        return [fingerprint(p) for p in parameters if not _phantom(p)]

    def _save(
        self, original: Callable[..., Any], value: Any, file: Any, *args: Any, **more: Any
    ) -> Any:
        name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        result = original(value, file, *args, **more)
        if isinstance(name, str | os.PathLike):
            self.facts.add(
                "saves", path=os.path.abspath(name), where=where(), prefixed=_prefixed(value)
            )
        return result

    def _join(self, original: Callable[..., Any], join: Any) -> Any:
        self.facts.data["joined"] = True
        return original(join)

    def _destroyed(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.facts.add("groups", what="destroyed", where=where())
        return original(*args, **more)

    def _by_hand(
        self, name: str, original: Callable[..., Any], *args: Any, **more: Any
    ) -> Any:  # fmt: skip
        if not self.inside:  # not SyncBatchNorm's
            calls = self.facts.data["calls"]
            calls[name] = calls.get(name, 0) + 1
            self.reduced_by_hand = True
        return original(*args, **more)


def _phantom(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "raw", tensor).is_meta)


def _worth(number: int) -> bool:
    """Whether this step is looked at closely; the same steps on every rank."""
    return number < _ALL or number % _SOME == 0


def _prefixed(value: Any) -> bool:
    """Whether a checkpoint has the names of the DDP wrapper, which begin with ``module.``"""
    states = [value, *value.values()] if isinstance(value, dict) else []
    return any(
        isinstance(s, dict) and s and all(str(key).startswith("module.") for key in s)
        for s in states
    )  # fmt: skip
