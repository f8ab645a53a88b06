"""What graders see of a hand-written data-parallel backward pass, and say about it.

:func:`backward` runs in a rank, :func:`compare` where the ranks' results have come together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labutils.grading import difference

Prepare = Callable[[nn.Module], object]


class Seen(dict[str, Any]):
    """What was seen in one rank; shown without its many numbers."""

    def __repr__(self) -> str:
        return ", ".join(f"{key}: {_shown(value)}" for key, value in self.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if not isinstance(value, torch.Tensor):
        return str(value)
    first = " ".join(f"{number:.3f}" for number in value[:3].tolist())
    return f"({first} ... {value.numel()} numbers)"


class AllReduces:
    """The all-reduces that were begun through ``torch.distributed.all_reduce``."""

    def __init__(self) -> None:
        self.asynchronous: list[bool] = []
        """One entry per call."""
        self.waited = 0
        """How many of them were waited for so far."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the block runs."""
        original = dist.all_reduce

        def counting(tensor: Any, *args: Any, **more: Any) -> Any:
            self.asynchronous.append(bool(more.get("async_op") or args[2:3] == (True,)))
            work = original(tensor, *args, **more)
            return None if work is None else _Told(work, self)

        dist.all_reduce = counting
        try:
            yield
        finally:
            dist.all_reduce = original


class _Told:
    """A ``Work`` that counts when it is waited for."""

    def __init__(self, work: Any, calls: AllReduces) -> None:
        self._work, self._calls = work, calls

    def wait(self, *args: Any, **more: Any) -> Any:
        self._calls.waited += 1
        return self._work.wait(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def network(layers: int, width: int = 4) -> nn.Sequential:
    """The same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layers)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def backward(prepare: Prepare | None, finish: Prepare | None, layers: int) -> Seen:
    """Two backward passes, each on samples of this rank's own, and what was to be seen of them.

    Args:
        prepare: is given the network before the first pass.
        finish: is given the network after each pass.

    Returns:
        "gradients": one flat tensor per pass; and where the passes were prepared, so that overlap
        counts, "all-reduces": how many were begun in each pass; "begun before the last gradient":
        how many of them; "asynchronous": whether all were; "waited for at once": whether those
        that had begun before the last gradient had also been waited for.
    """
    module, calls = network(layers), AllReduces()
    before_last: list[int] = []
    waited: list[int] = []
    last = next(module.parameters())  # a backward pass comes to the first parameters last

    def look(_: Any) -> None:
        before_last.append(len(calls.asynchronous))
        waited.append(calls.waited)

    last.register_hook(look)
    gradients, counts = [], []
    with calls.counted():
        if prepare is not None:
            prepare(module)
        for step in range(2):
            begun, ended = len(calls.asynchronous), calls.waited
            _one_pass(module, step)
            if finish is not None:
                finish(module)
            gradients.append(_gradients(module))
            counts.append(len(calls.asynchronous) - begun)
            before_last[-1] -= begun
            waited[-1] -= ended
    if prepare is None:  # any way to the right gradients will do
        return Seen({"gradients": gradients})
    overlap: dict[str, Any] = {"begun before the last gradient": before_last}
    at_once = any(0 < begun <= ended for begun, ended in zip(before_last, waited))
    overlap |= {"asynchronous": all(calls.asynchronous), "waited for at once": at_once}
    return Seen({"gradients": gradients, "all-reduces": counts} | overlap)


def compare(yours: Sequence[Seen], expected: Sequence[Seen]) -> str | None:
    """What is wrong with what the ranks hold (one :class:`Seen` per rank), in one sentence."""
    passes = range(len(expected[0]["gradients"]))
    for step in passes:
        mine, right = ([seen["gradients"][step] for seen in all_] for all_ in (yours, expected))
        if fault := _gradient_fault(mine, right):
            return f"after pass {step + 1} {fault}" if len(passes) > 1 else fault
    faults = (_overlap_fault(mine, right) for mine, right in zip(yours, expected))
    return next((f"right gradients, but {fault}" for fault in faults if fault), None)


def _gradient_fault(mine: list[torch.Tensor], right: list[torch.Tensor]) -> str | None:
    """One tensor per rank; ``right`` is the same on all."""
    pairs = list(zip(mine, right))
    if not any(difference(a, b) for a, b in pairs):
        return None
    if any(a.shape != b.shape for a, b in pairs):
        return f"there are {mine[0].numel()} gradients instead of {right[0].numel()}"
    if any(difference(a, mine[0]) for a in mine):
        return "the ranks hold different gradients: not all were averaged, or not waited for"
    factor = (mine[0] @ right[0] / (right[0] @ right[0])).item()
    if difference(mine[0], factor * right[0]):
        return "the gradients are alike on all ranks, but they are not the average"
    return f"the gradients are {factor:.3g} times the average: {_divisor(factor, len(mine))}"


def _divisor(factor: float, ranks: int) -> str:
    if factor < 1:
        return "they were divided once too often"
    if round(factor, 3) == ranks:
        return "divide by the number of ranks"
    return f"divide by {factor:.3g}"


def _overlap_fault(mine: Seen, right: Seen) -> str | None:
    for key, told in (
        ("all-reduces", "{} all-reduces in pass {} instead of {}"),
        (
            "begun before the last gradient",
            "{} all-reduces begun before the last gradient of pass "
            "{} was ready instead of {}: start each as soon as it can",
        ),
    ):
        for step, (found, wanted) in enumerate(zip(mine.get(key, ()), right.get(key, ())), 1):
            if found != wanted:
                said = told.format(found, step, wanted)
                return said.replace("1 all-reduces", "1 all-reduce") if found == 1 else said
    if mine.get("asynchronous") != right.get("asynchronous"):
        return "an all-reduce is not asynchronous (async_op=True): the backward waits for it"
    if mine.get("waited for at once") and not right.get("waited for at once"):
        return (
            "each all-reduce is waited for before the backward pass goes on, so that nothing "
            "overlaps: keep the handles, and wait after the last gradient"
        )
    return None


def _one_pass(module: nn.Module, step: int) -> None:
    module.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    module(torch.randn(3, 4, generator=generator)).square().mean().backward()


def _gradients(module: nn.Module) -> torch.Tensor:
    missing = [name for name, p in module.named_parameters() if p.grad is None]
    if missing:
        raise ValueError(f"after the backward pass {', '.join(missing)} has no gradient.")
    return torch.cat([p.grad.detach().flatten() for p in module.parameters()])  # type: ignore[union-attr]


__all__ = ["AllReduces", "Seen", "backward", "compare", "network"]
