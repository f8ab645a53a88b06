"""What a model is trained on: random batches of the right shapes, and the loss.

A task gives ``(inputs, targets)``: the model is called as ``model(*inputs)``, and its outputs are
compared with the targets. That division is the one ``DataParallel`` needs: the inputs are
scattered over the devices, and the loss is computed where the outputs are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = tuple[Tensor, ...]
Device = torch.device | str


class Task(Protocol):
    """``seq`` is the usual number of tokens, 0 where there are none; ``longest`` the most."""

    @property
    def seq(self) -> int: ...
    @property
    def longest(self) -> int: ...

    def batch(self, n: int, seq: int, device: Device) -> tuple[Inputs, Tensor]:
        """``n`` samples of ``seq`` tokens, as ``(inputs, targets)``."""

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The scalar to minimise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """Samples of ``shape``, images or vectors, in ``classes`` classes."""

    shape: tuple[int, ...]
    classes: int
    auxiliary: float = 0.4
    """Weight of a second set of scores, where the model returns one (Inception-v3)."""
    seq: int = 0
    longest: int = 0

    def batch(self, n: int, seq: int, device: Device) -> tuple[Inputs, Tensor]:
        targets = torch.randint(self.classes, (n,), device=device)
        return (torch.randn(n, *self.shape, device=device),), targets

    def loss(self, outputs: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            return F.cross_entropy(outputs, targets)
        scores, auxiliary = outputs
        extra = F.cross_entropy(auxiliary, targets)
        return F.cross_entropy(scores, targets) + self.auxiliary * extra


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """SQuAD: in a question and a text, find the first and the last token of the answer."""

    vocabulary: int
    seq: int = 384
    longest: int = 512

    def batch(self, n: int, seq: int, device: Device) -> tuple[Inputs, Tensor]:
        tokens = torch.randint(self.vocabulary, (n, seq), device=device)
        segments = torch.randint(2, (n, seq), device=device)
        mask = torch.ones(n, seq, dtype=torch.bool, device=device)
        return (tokens, segments, mask), torch.randint(seq, (n, 2), device=device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy over the tokens, averaged over start and end."""
        return F.cross_entropy(outputs, targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors(Questions):
    """For BERT without a head: a stand-in loss that reaches every parameter."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken:
    """Predict each next token."""

    vocabulary: int
    seq: int = 1024
    longest: int = 1024

    def batch(self, n: int, seq: int, device: Device) -> tuple[Inputs, Tensor]:
        text = torch.randint(self.vocabulary, (n, seq + 1), device=device)
        return (text[:, :-1].contiguous(),), text[:, 1:].contiguous()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTokenWithMemory:
    """Predict each next token, given the states of the segment before (Transformer-XL).

    Targets are drawn so that each tail cluster has the given share of them. The memory is as
    long as the segment, and the model computes the loss of every token itself.
    """

    layers: int
    hidden: int
    edges: tuple[int, ...]
    """Where the clusters of the vocabulary end."""
    shares: tuple[float, ...]
    """Share of the words in each cluster after the first."""
    seq: int = 192
    longest: int = 0

    def batch(self, n: int, seq: int, device: Device) -> tuple[Inputs, Tensor]:
        tokens = torch.randint(self.edges[0], (n, seq), device=device)
        targets = self._targets(n * seq, device).view(n, seq)
        memory = torch.randn(n, self.layers, seq, self.hidden, device=device)
        return (tokens, targets, memory), targets

    def _targets(self, count: int, device: Device) -> Tensor:
        tails = [math.floor(share * count) for share in self.shares]
        parts, low = [], 0
        for size, high in zip([count - sum(tails), *tails], self.edges, strict=True):
            parts.append(torch.randint(low, high, (size,), device=device))
            low = high
        return torch.cat(parts)[torch.randperm(count, device=device)]

    def loss(self, outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        return outputs[0].mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A user's own data: an example batch, repeated or cut to the size asked for."""

    inputs: Inputs
    targets: Tensor
    criterion: Any
    seq: int = 0
    longest: int = 0

    def batch(self, n: int, seq: int, device: Device) -> tuple[Inputs, Tensor]:
        resized = [self._resize(tensor, n).to(device) for tensor in (*self.inputs, self.targets)]
        return tuple(resized[:-1]), resized[-1]

    @staticmethod
    def _resize(tensor: Tensor, n: int) -> Tensor:
        return tensor[torch.arange(n, device=tensor.device) % len(tensor)]

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.criterion(outputs, targets)
