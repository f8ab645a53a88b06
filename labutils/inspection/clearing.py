"""Seeing whether gradients are cleared between optimizer steps, in whatever way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from labutils.inspection.facts import Facts, checksum, wrap


class ClearingObserver:
    """Compares a gradient of each optimizer at the start of a backward pass with what was left.

    That also sees ``p.grad = None``, ``p.grad.zero_()`` and a gradient that is scaled down to go on
    from.  One parameter tells for all of its optimizer.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.left = WeakTensorKeyDictionary()
        """Checksum of its gradient after the last step or backward pass, by the parameter."""
        self.chosen: set[int] = set()
        self.stepped = False
        """Whether no backward pass has begun since the last optimizer step."""

    def install(self) -> None:
        """Watch from now on, in this process."""
        for owner in (torch.optim.Optimizer, nn.Module):
            wrap(owner, "zero_grad", self._cleared)

    def _cleared(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.facts.data["cleared"] = True
        return original(*args, **more)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose a parameter at the first step, and remember the gradients that are left."""
        if self.facts.data["cleared"]:
            return
        if id(optimizer) not in self.chosen:
            self.chosen.add(id(optimizer))
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if (first := next(filter(_seen, parameters), None)) is not None:
                self.left[first] = 0
        self.stepped = True
        self.remember()

    def before_backward(self) -> None:
        """Count a pass that adds to the gradients of the step before."""
        if any(_gradient(p) != before for p, before in self.left.items()):
            self.facts.data["cleared"] = True
        self.facts.data["kept"] += bool(self.stepped and self.left)
        self.stepped = False

    def remember(self) -> None:
        """What backward pass or optimizer step have left."""
        for parameter in list(self.left):
            self.left[parameter] = _gradient(parameter)


def _seen(parameter: torch.Tensor) -> bool:
    """Whether its gradient has values that can be compared, and is not zero."""
    grad = parameter.grad
    plain = getattr(grad, "raw", grad)
    return plain is not None and not plain.is_sparse and not plain.is_meta and bool(plain.any())


def _gradient(parameter: torch.Tensor) -> int | None:
    return None if parameter.grad is None else checksum(parameter.grad)
