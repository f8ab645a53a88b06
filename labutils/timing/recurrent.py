"""Recurrent layers as cuDNN runs them: one kernel per layer and direction, not one per time step.

To PyTorch a virtual GPU is a CPU, where it takes ``nn.GRU`` and ``nn.RNN`` apart into their time
steps (an ``nn.LSTM`` it hands on as a whole).  On phantom GPUs, where nothing is multiplied, they
can take the LSTM's way: the operation has the same arguments, and its cost follows from the shapes
of the weights, three gates in a GRU, one in an RNN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_LSTM = 2
"""The operation's number for it.  That for a GRU wants biases as a CPU's library keeps them."""


class _Whole(nn.RNNBase):
    """A layer that does not take itself apart.  Only its class is put in place of another's."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return super().forward(input, hx)  # the layer's own, step by step
        batched = input.dim() == 3
        swapped = batched and self.batch_first
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if swapped else x
        shape = self.num_layers * (1 + self.bidirectional), x.shape[1], self.hidden_size
        start = x.new_zeros(shape) if hx is None else hx if batched else hx.unsqueeze(1)
        ends = []
        for layer in range(self.num_layers):
            made = [self._one(x, start, layer, way) for way in range(1 + self.bidirectional)]
            x = torch.cat([out for out, _ in made], -1) if self.bidirectional else made[0][0]
            ends += [end for _, end in made]
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        x, end = x.transpose(0, 1) if swapped else x, torch.stack(ends)
        return (x, end) if batched else (x.squeeze(1), end.squeeze(1))

    def _one(self, x: Tensor, start: Tensor, layer: int, way: int) -> tuple[Tensor, Tensor]:
        suffix = f"l{layer}{'_reverse' if way else ''}"
        weights = [getattr(self, f"weight_{kind}_{suffix}") for kind in ("ih", "hh")]
        hidden = start[layer * (1 + self.bidirectional) + way]
        if self.bias:
            biases = [getattr(self, f"bias_{kind}_{suffix}") for kind in ("ih", "hh")]
        else:
            biases = [w.new_zeros(w.shape[0]) for w in weights]
        out, end, _, _ = torch.ops.aten.mkldnn_rnn_layer(
            x, *weights, *biases, hidden, torch.zeros_like(hidden), bool(way), [],
            _LSTM, self.hidden_size, self.num_layers, self.bias, self.bidirectional,
            False, self.training,
        )  # fmt: skip
        return out, end


_WHOLE: dict[type[nn.Module], Any] = {
    kind: type(kind.__name__, (_Whole, kind), {}) for kind in (nn.GRU, nn.RNN)
}


def join_steps(model: nn.Module) -> None:
    """Let every GRU and RNN of a phantom ``model`` run as a whole; a packed sequence still does
    not.  Subclasses stay as they are, since they may have a forward of their own."""
    for module in model.modules():
        if type(module) in _WHOLE:
            module.__class__ = _WHOLE[type(module)]


def goes_by_steps(module: nn.Module) -> bool:
    """Whether PyTorch takes this module apart into time steps, after :func:`join_steps`."""
    if isinstance(module, nn.LSTM):
        return bool(module.proj_size)
    return isinstance(module, nn.RNNBase) and not isinstance(module, _Whole)


__all__ = ["goes_by_steps", "join_steps"]
