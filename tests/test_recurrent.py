"""Recurrent layers on phantom GPUs: as a whole, with the real ones' shapes and arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labutils.timing.bench import phantom
from labutils.timing.predict import predict
from labutils.timing.recurrent import join_steps
from labutils.virtual.alone import isolated

OPTIONS: list[dict[str, Any]] = [
    {}, {"num_layers": 3, "dropout": 0.5}, {"bidirectional": True}, {"bias": False},
    {"batch_first": True, "num_layers": 2, "bidirectional": True},
]  # fmt: skip


class Own(nn.GRU):
    """It may have a forward of its own."""


class Last(nn.Module):
    """The class of a sequence from a layer's last output."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(6, 8, batch_first=True, **options)
        self.end = nn.Linear(options.get("proj_size", 8), 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layer(x)[0][:, -1])


def asked(model: nn.Module, steps: int = 5, **more: Any) -> Any:
    example = torch.zeros(2, steps, 6), torch.zeros(2, dtype=torch.int64)
    return predict(model, 4, **{"strategy": "single", "example": example, **more})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("sizes", [(5, 4, 6), (5, 6)])
def test_results_and_gradients_have_the_shapes_of_the_real_layer(
    kind: Any, options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    real = kind(6, 8, **options)
    with isolated(1):
        whole = phantom(real)
        join_steps(whole)
        for start in (False, True):
            expected, end = real(torch.zeros(sizes))
            hx = torch.zeros(end.shape) if start else None
            out, last = whole(
                torch.zeros(sizes, device="vgpu"), None if hx is None else hx.to("vgpu")
            )
            assert (out.shape, last.shape) == (expected.shape, end.shape)
            (out.sum() + last.sum()).backward()
            assert all(p.grad.shape == p.shape for p in whole.parameters())
            whole.zero_grad()
        assert type(real) is kind


def test_a_gru_costs_three_quarters_of_an_lstm_and_an_rnn_one() -> None:
    """Where the arithmetic is all that counts: as many products as gates."""

    def seconds(kind: Any) -> float:
        trace = asked(Large(kind), example=large).trace
        return sum(s.duration for s in trace.spans if s.name.startswith("mkldnn_rnn"))

    class Large(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.layer = kind(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1))[0][-1]

    large = torch.zeros(2, 64, 1024), torch.zeros(2, dtype=torch.int64)
    lstm, gru, rnn = map(seconds, (nn.LSTM, nn.GRU, nn.RNN))
    assert gru / lstm == pytest.approx(3 / 4, rel=0.15)
    assert rnn / lstm == pytest.approx(1 / 4, rel=0.3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_longer_sequence_launches_no_more(kind: Any) -> None:
    spans = [len(asked(Last(kind), steps).trace.spans) for steps in (5, 50)]
    assert spans[0] == spans[1]


@pytest.mark.parametrize(("strategy", "gpus"), [("ddp", 2), ("dp", 2)])
def test_with_replicas(strategy: str, gpus: int) -> None:
    prediction = asked(Last(nn.GRU), strategy=strategy, gpus=gpus, profile="DGX-A100")
    assert not any("step by step" in note for note in prediction.notes)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Last(nn.LSTM), ""), (Last(nn.GRU), ""), (Last(nn.RNN), ""),
        (Last(Own), "Own"), (Last(nn.LSTM, proj_size=3), "LSTM"),
    ],
)  # fmt: skip
def test_what_still_goes_step_by_step_is_said(model: nn.Module, name: str) -> None:
    notes = [note for note in asked(model).notes if "step by step" in note]
    assert bool(notes) == bool(name)
    assert all(note.startswith(f"{name} layers") for note in notes)
