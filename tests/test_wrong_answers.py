"""Every plausible wrong answer to an exercise must be found out; ``wrong_answers/`` holds them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import labutils as lab
from labutils import exercises
from tests import wrong_answers

WRONG: dict[str, list[Callable[..., Any]]] = {}
for _module in pkgutil.iter_modules(wrong_answers.__path__):
    WRONG |= importlib.import_module(f"tests.wrong_answers.{_module.name}").WRONG


def test_every_exercise_of_the_labs_has_wrong_answers_here() -> None:
    assert set(WRONG) == set(exercises.names())
    assert all(len(answers) >= 3 for answers in WRONG.values())


@pytest.mark.parametrize(
    ("name", "answer"), [(n, a) for n, answers in WRONG.items() for a in answers]
)
def test_a_wrong_answer_is_found_out(
    name: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    if name == "data_parallel_forward":
        lab.gpus(4)
    assert lab.exercise(name)(answer) is not answer
    verdict = lab.check(name)
    assert not verdict
    assert verdict.grade.failures


def ring_with_padding_and_batches(x: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = -(-len(x) // ranks)
    padded = torch.cat([x, x.new_zeros(size * ranks - len(x))])
    chunks = list(padded.chunk(ranks))
    for s in range(2 * (ranks - 1)):
        received = torch.empty(size)
        operations = [
            dist.P2POp(dist.isend, chunks[(rank - s) % ranks], (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        target = chunks[(rank - s - 1) % ranks]
        target.copy_(target + received if s < ranks - 1 else received)
    x.copy_(padded[: len(x)])


def mean_as_a_tensor(losses: list[float], sizes: list[int]) -> torch.Tensor:
    weights = torch.tensor(sizes, dtype=torch.float64)
    return (torch.tensor(losses, dtype=torch.float64) * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    ("name", "answer"),
    [("ring_all_reduce", ring_with_padding_and_batches), ("mean_loss", mean_as_a_tensor)],
)
def test_another_right_answer_is_accepted(
    name: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    lab.exercise(name)(answer)
    assert lab.check(name), lab.check(name)
