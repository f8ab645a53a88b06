"""What graders see of a hand-written data-parallel backward pass.

Everything here runs in a rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Prepare = Callable[[nn.Module], object]


class AllReduces:
    """The all-reduces that were begun through ``torch.distributed.all_reduce``."""

    def __init__(self) -> None:
        self.asynchronous: list[bool] = []
        """One entry per call."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the block runs."""
        original = dist.all_reduce

        def counting(tensor: Any, *args: Any, **more: Any) -> Any:
            self.asynchronous.append(bool(more.get("async_op") or args[2:3] == (True,)))
            return original(tensor, *args, **more)

        dist.all_reduce = counting
        try:
            yield
        finally:
            dist.all_reduce = original


def network(layers: int, width: int = 4) -> nn.Sequential:
    """The same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layers)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def backward(prepare: Prepare | None, finish: Prepare | None, layers: int) -> dict[str, Any]:
    """Two backward passes, each on samples of this rank's own, and what was to be seen of them.

    Args:
        prepare: is given the network before the first pass.
        finish: is given the network after each pass.

    Returns:
        "gradients": one flat tensor per pass; "all-reduces": how many were begun in each pass;
        "begun before the last gradient": how many of them; "asynchronous": whether all were.
    """
    module, calls = network(layers), AllReduces()
    before_last: list[int] = []
    last = next(module.parameters())  # a backward pass comes to the first parameters last
    last.register_hook(lambda _: before_last.append(len(calls.asynchronous)))
    found: dict[str, Any] = {"gradients": [], "all-reduces": []}
    with calls.counted():
        if prepare is not None:
            prepare(module)
        for step in range(2):
            begun = len(calls.asynchronous)
            _one_pass(module, step)
            if finish is not None:
                finish(module)
            found["gradients"].append(_gradients(module))
            found["all-reduces"].append(len(calls.asynchronous) - begun)
            before_last[-1] -= begun
    early = {"begun before the last gradient": before_last, "asynchronous": all(calls.asynchronous)}
    return found if prepare is None else found | early


def _one_pass(module: nn.Module, step: int) -> None:
    module.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    module(torch.randn(3, 4, generator=generator)).square().mean().backward()


def _gradients(module: nn.Module) -> torch.Tensor:
    missing = [name for name, p in module.named_parameters() if p.grad is None]
    if missing:
        raise ValueError(f"after the backward pass {', '.join(missing)} has no gradient.")
    return torch.cat([p.grad.detach().flatten() for p in module.parameters()])  # type: ignore[union-attr]


__all__ = ["AllReduces", "backward", "network"]
