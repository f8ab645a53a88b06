"""A model and all it takes to train it for one step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from labutils.models.tasks import Device, Inputs, Sample, Task

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """How to build a model, feed it, and train it.

    >>> spec = models.spec("resnet50")
    >>> model = spec.build()
    >>> inputs, targets = spec.batch(32)
    >>> spec.loss(model, inputs, targets).backward()
    >>> spec.optimizer(model.parameters()).step()
    """

    name: str
    build: Callable[[], nn.Module]
    """Makes the model; under ``with torch.device("meta")`` it costs neither memory nor time."""
    task: Task
    optimizer: MakeOptimizer
    """Makes the optimizer of the published runs from the parameters."""
    parameters: int | None = None
    """The published number of parameters of the default model; None with other options."""
    source: str = ""
    """Where the architecture and the number of parameters are published."""

    def batch(
        self, n: int, seq: int | None = None, device: Device = "cpu"
    ) -> tuple[Inputs, Tensor]:
        """Random ``(inputs, targets)`` of ``n`` samples of ``seq`` tokens (default: the usual).

        Raises:
            ValueError: ``n`` or ``seq`` is not positive, ``seq`` is too long for the model, or
                the model does not read tokens.
        """
        if n < 1:
            raise ValueError(f"{self.name}: batch is {n}, but must be at least 1.")
        return self.task.batch(n, self._tokens(seq), device)

    def _tokens(self, seq: int | None) -> int:
        if seq is None:
            return self.task.seq
        if not self.task.seq:
            raise ValueError(f"{self.name} does not read tokens; leave seq (now {seq}) out.")
        if seq < 1 or (self.task.longest and seq > self.task.longest):
            most = f" and at most {self.task.longest}" if self.task.longest else ""
            raise ValueError(f"{self.name}: seq is {seq}, but must be at least 1{most}.")
        return seq

    def criterion(self, outputs: Any, targets: Tensor) -> Tensor:
        """The scalar loss of the model's outputs."""
        return self.task.loss(outputs, targets)

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """One forward pass of ``model``, wrapped or not, to the scalar loss."""
        return self.criterion(model(*inputs), targets)


def from_module(
    model: nn.Module,
    example: tuple[Tensor | Inputs, Tensor],
    *,
    criterion: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    optimizer: MakeOptimizer,
) -> ModelSpec:
    """The spec of your own model, from one example batch ``(inputs, targets)`` of any size.

    ``build`` gives copies: the model itself is left as it is.

    Raises:
        ValueError: a tensor of the example has no samples, or they differ in number; the model is
            lazy, complex, compiled, or in a wrapper for several GPUs.
        TypeError: the example holds something else than tensors.
    """
    name = type(model).__name__
    _trainable(model, name)
    inputs, targets = _tensors(example, name)
    tensors = (*inputs, targets)
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"{name}: the example's tensors have {sorted(sizes)} samples, "
            "but all must have the same number, at least 1, in their first dimension."
        )
    return ModelSpec(
        name=name,
        build=lambda: copy.deepcopy(model),
        task=Sample(inputs=inputs, targets=targets, criterion=criterion),
        optimizer=optimizer,
    )


def _tensors(example: Any, name: str) -> tuple[Inputs, Tensor]:
    pair: Any = example if isinstance(example, tuple | list) and len(example) == 2 else (0, 0)
    given, targets = pair
    inputs = tuple(given) if isinstance(given, tuple | list) else (given,)
    if all(isinstance(tensor, Tensor) for tensor in (*inputs, targets)):
        return inputs, targets
    raise TypeError(
        f"{name}: example is (inputs, targets) with a tensor or a tuple of tensors as inputs, "
        "which are handed to the model one by one, and a tensor as targets. For a model that "
        "takes a dict, or a loss that takes more, write a small module around it."
    )


def _trainable(model: nn.Module, name: str) -> None:
    for where, module in model.named_modules():
        place = f"{name}: {where!r}" if where else name
        if _compiled(module):
            raise ValueError(
                f"{place} is compiled, but what is recorded are PyTorch's own operators, one by "
                "one: pass the module as it was before torch.compile or torch.jit."
            )
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{place} is a wrapper for several GPUs already: pass its .module, and say with "
                "strategy how that is to be wrapped."
            )
    for where, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(
                f"{name}: {where!r} has no shape yet, as its layer is lazy: call the model once "
                "with a batch first."
            )
        if tensor.is_complex():
            raise ValueError(f"{name}: {where!r} is complex, which has no cost model here.")


def _compiled(module: nn.Module) -> bool:
    """By ``torch.compile``, as a wrapper or in place (``model.compile()``), or by ``torch.jit``."""
    # The wrapper's own class lies in torch._dynamo, whose import takes seconds.
    wrapped = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    return wrapped or isinstance(module, torch.jit.ScriptModule)
