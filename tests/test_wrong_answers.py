"""Every plausible wrong answer to an exercise must be found out; ``wrong_answers/`` holds them."""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
    ("name", "answer"),
    [
        pytest.param(n, a, marks=pytest.mark.full if number > 4 else ())
        for n, answers in WRONG.items()
        for number, a in enumerate(answers, 1)
    ],
)
def test_a_wrong_answer_is_found_out(
    name: str,
    answer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    if name == "data_parallel_forward":
        lab.gpus(4)
    assert lab.exercise(name)(answer) is exercises._load(name).function
    assert f"Exercise {name}: not right yet" in capsys.readouterr().out
    if answer is WRONG[name][0]:  # the same grading once more, and what a learner sees of it
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


def save_by_way_of_memory_on_the_last_rank(ddp: Any, path: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        state = io.BytesIO()
        torch.save(ddp.module.state_dict(), state)
        with open(f"{path}.part", "wb") as file:
            file.write(state.getvalue())
        os.replace(f"{path}.part", path)
    dist.barrier()


def temperature_as_a_part_of_the_network(network: nn.Module, temperature: nn.Parameter) -> Any:
    network.temperature = temperature
    network.register_forward_hook(lambda module, _, made: made / module.temperature)
    return DistributedDataParallel(network)


def seconds_by_another_clock(step: Any, synchronize: Any) -> float:
    synchronize()
    start = time.time_ns()
    step()
    synchronize()
    return (time.time_ns() - start) / 1e9


def device_of_this_kind(environment: Any) -> torch.device:
    return torch.device("vgpu", int(environment["LOCAL_RANK"]))


def shards_as_a_tensor(batch: int, gpus: int) -> torch.Tensor:
    return torch.tensor([len(part) for part in torch.arange(batch).chunk(gpus)])


def fitted_by_algebra(with_1: float, with_2: float) -> Any:
    return numpy.linalg.solve([[1, 1], [0.5, 1]], [with_1, with_2])


def padded_by_torch(samples: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True), [len(s) for s in samples]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("shard_sizes", shards_as_a_tensor),
        ("fit_loading", fitted_by_algebra),
        ("pad_batch", padded_by_torch),
        ("ring_all_reduce", ring_with_padding_and_batches),
        ("mean_loss", mean_as_a_tensor),
        ("save_checkpoint", save_by_way_of_memory_on_the_last_rank),
        ("whole_model", temperature_as_a_part_of_the_network),
        ("seconds_of", seconds_by_another_clock),
        ("device_of_rank", device_of_this_kind),
    ],
)
def test_another_right_answer_is_accepted(
    name: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    if answer is device_of_this_kind:
        lab.gpus(2)
    lab.exercise(name)(answer)
    assert lab.check(name), lab.check(name)
