"""The model of workers, and what loader_report recommends, on loads whose answer is known."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import labutils as lab
from labutils.loading import curves, measure
from labutils.loading.measure import Setting
from labutils.loading.model import LoadingModel, fit, usable_workers
from labutils.timing import published


class Remote(Dataset[Any]):
    """Each sample takes 5 ms of waiting and hardly any CPU."""

    def __init__(self, length: int = 4096, seconds: float = 0.005) -> None:
        self.length, self.seconds, self.read = length, seconds, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        time.sleep(self.seconds)
        return torch.zeros(4)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.001)
            yield torch.zeros(4)


# -- the model -------------------------------------------------------------------------------------


def test_the_model_is_the_formula() -> None:
    model = LoadingModel(load_s=0.1, step_s=0.03, overhead_s=0.002, load_cpu_s=0.05, cores=2)
    assert model.seconds(0) == pytest.approx(0.13)
    assert model.seconds(1) == pytest.approx(0.102)
    assert model.seconds(3) == pytest.approx(0.1 / 3 + 0.002)
    assert model.seconds(8) == pytest.approx(0.03)  # the step
    assert LoadingModel(0.1, 0.01, 0, 0.05, cores=2).seconds(64) == pytest.approx(
        0.025
    )  # the cores
    assert model.workers() == 4 and model.idle(4) == 0.0
    assert model.workers(most=2) == 2


def test_two_measurements_give_the_model_back() -> None:
    true = LoadingModel(0.12, 0.02, 0.004)
    found = fit({1: 0.124, 3: 0.044}, 0.02, cores=4)
    assert found.load_s == pytest.approx(true.load_s)
    assert found.overhead_s == pytest.approx(true.overhead_s)


def test_the_fit_refuses_other_numbers_of_measurements() -> None:
    with pytest.raises(ValueError, match="two numbers of workers"):
        fit({0: 1.0, 1: 1.0}, 0.1)


def test_workers_that_wait_may_be_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labutils.hardware.usable_cores", lambda: 4)
    assert usable_workers(0.1, 0.1) == 4
    assert usable_workers(0.1, 0.01) == 40
    assert usable_workers(0.1, 0.1, ranks=4) == 1


def test_a_figure_of_the_sweep() -> None:
    figure = curves.workers(
        LoadingModel(0.1, 0.02), {0: 0.12, 2: 0.05}, published.rows("loader_workers")
    )
    left, right = figure.axes
    assert [text for axes in (left, right) for text in (axes.get_xlabel(), axes.get_ylabel())] == [
        "workers", "time per batch [ms]", "workers", "loader throughput [samples/s]",
    ]  # fmt: skip
    assert "published" in right.get_title()


# -- the report ------------------------------------------------------------------------------------


def report(loader: DataLoader[Any], step: Any = None, **options: Any) -> Any:
    return lab.loader_report(loader, step or train, **{"seconds": 1.0, **options})


def train(batch: Any) -> None:
    """A step that keeps a device busy, and no core."""
    torch.rand(1)
    time.sleep(0.005)


def test_waiting_wants_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labutils.hardware.usable_cores", lambda: 2)
    found = report(DataLoader(Remote(), batch_size=8), lambda batch: time.sleep(0.005))
    assert found.recommended["num_workers"] > 3
    assert "waiting for a disk or a network" in repr(found)
    assert found.idle > 0.7
    assert found.findings.loading.load_s == pytest.approx(0.04, rel=0.5)


def test_nothing_to_load_wants_no_workers() -> None:
    data = TensorDataset(torch.randn(4096, 8))
    found = report(DataLoader(data, batch_size=32, num_workers=2), lambda batch: batch[0].sum())
    assert found.recommended == {"num_workers": 0, "pin_memory": False}


def test_a_long_step_wants_few_workers() -> None:
    found = report(DataLoader(Remote(), batch_size=4), lambda batch: time.sleep(0.1))
    assert found.recommended["num_workers"] in (1, 2)  # two where other programs disturb


def pretend(monkeypatch: pytest.MonkeyPatch, model: LoadingModel, switches: float) -> Any:
    """Let measurements come from a model, in which each worker beyond the cores costs a little."""

    def true(workers: int) -> float:
        extra = max(0, workers - model.cores * model.load_s / max(model.load_cpu_s, 1e-9))
        return model.seconds(workers) * (1 + switches * extra)

    def run(
        loader: Any, setting: Setting, step: Any, seconds: float, dataset: Any = None
    ) -> tuple[measure.Measured, Any]:
        steps = model.step_s if step is not None else 0.0
        took = true(setting.num_workers) if step else replace(model, step_s=0).seconds(1)
        times = (model.load_s, model.load_cpu_s, 0.0, 0.0, 0.1)
        return measure.Measured(setting, 10, took, took - steps, *times), torch.zeros(4)

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "alone", lambda *_: (model.step_s, model.step_cpu_s))
    monkeypatch.setattr("labutils.hardware.usable_cores", lambda: int(model.cores))
    return true


@pytest.mark.parametrize("case", range(40))
def test_the_recommendation_reaches_the_best_of_all(
    case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 % of the fastest number of workers, found by trying them all on the model."""
    rng = random.Random(case)
    load = 10 ** rng.uniform(-3.5, -0.5)
    model = LoadingModel(
        load_s=load, step_s=10 ** rng.uniform(-3, -0.5), overhead_s=rng.uniform(0, 0.001),
        load_cpu_s=load * rng.choice([1.0, 0.6, 0.05]), cores=rng.choice([1, 2, 8, 32]),
    )  # fmt: skip
    true = pretend(monkeypatch, model, switches=rng.choice([0.0, 0.01]))
    chosen = lab.loader_report(DataLoader([1, 2]), train).recommended["num_workers"]
    best = min(true(workers) for workers in range(65))
    assert true(chosen) <= best / 0.95


LOADERS: dict[str, Any] = {
    "shuffled": lambda g: DataLoader(Remote(64, 0.001), batch_size=4, shuffle=True, generator=g),
    "batch sampler": lambda g: DataLoader(
        Remote(64, 0.001),
        batch_sampler=BatchSampler(RandomSampler(range(64), generator=g), 4, True),
    ),
    "no batches": lambda g: DataLoader(Remote(64, 0.001), batch_size=None, num_workers=1),
    "stream": lambda g: DataLoader(Endless(), batch_size=4, num_workers=2),
    "collate": lambda g: DataLoader(Remote(64, 0.001), batch_size=4, collate_fn=lambda x: {"x": x}),
    "persistent": lambda g: DataLoader(Remote(64, 0.001), num_workers=1, persistent_workers=True),
    "ours": lambda g: lab.Loader(Remote(64, 0.001), batch_size=4, shuffle=True, generator=g),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_loader_and_its_state_is_kept(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    loader = LOADERS[kind](generator)
    kept = generator.get_state(), torch.get_rng_state()
    others = random.getstate(), np.random.get_state()[1].copy()
    found = lab.loader_report(loader, train, seconds=0.5)
    assert found.recommended["num_workers"] >= 0 and found.findings.runs
    assert torch.equal(kept[0], generator.get_state()) and torch.equal(
        kept[1], torch.get_rng_state()
    )
    assert others[0] == random.getstate() and np.array_equal(others[1], np.random.get_state()[1])
    assert getattr(loader.dataset, "read", 0) == 0  # read in workers, or on a copy
    assert loader._iterator is None and loader._IterableDataset_len_called is None


def test_a_copy_shares_what_is_large_and_no_state() -> None:
    class Counts(Dataset[Any]):
        def __init__(self) -> None:
            self.table, self.rng = torch.zeros(2**20), np.random.default_rng(1)

    original = Counts()
    copied = measure.independent(original)
    assert copied.table is original.table
    assert copied.rng.integers(1000) == np.random.default_rng(1).integers(1000)
    assert original.rng.integers(1000) == np.random.default_rng(1).integers(1000)


def test_a_data_set_that_cannot_be_copied_is_read_in_workers() -> None:
    class Locked(Remote):
        def __init__(self) -> None:
            super().__init__(64)
            import threading

            self.lock = threading.Lock()

    loader = DataLoader(Locked(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    found = report(loader)
    assert measure.independent(loader.dataset) is None
    assert all(setting.num_workers for setting in found.findings.runs)


@pytest.mark.parametrize(
    ("loader", "options", "error", "says"),
    [
        ([1, 2], {}, TypeError, "needs a torch.utils.data.DataLoader, but got list"),
        (DataLoader([1]), {"ranks": 0}, ValueError, "at least one rank"),
        (DataLoader([1]), {"seconds": 0}, ValueError, "cannot measure in 0 seconds: give it more"),
        (DataLoader([]), {}, ValueError, "yields no batch"),
    ],
)
def test_what_cannot_be_reported_on(
    loader: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        report(loader, **options)


def test_what_is_not_batched_is_not_counted_as_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, LoadingModel(0.1, 0.02, cores=2), 0.0)
    found = lab.loader_report(DataLoader([torch.zeros(3, 8)] * 4, batch_size=None), train)
    assert "loader_report: items, not batched" in repr(found)
    assert "items/s" in repr(found) and "samples" not in repr(found)


def test_pinning_for_nobody_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    pretend(monkeypatch, LoadingModel(0.1, 0.02, cores=2), 0.0)
    found = lab.loader_report(DataLoader([1, 2], pin_memory=True), train)
    assert found.recommended["pin_memory"] is False
    assert "pin_memory=True has no effect" in repr(found)


def test_a_sequence_of_settings_is_shown_with_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadingModel(0.1, 0.02, load_cpu_s=0.01, cores=2)
    pretend(monkeypatch, model, 0.0)
    found = lab.loader_report(DataLoader([1, 2]), train)
    assert found.idle == pytest.approx(1 - 0.02 / 0.12)
    assert found.recommended["num_workers"] == 5  # 0.1 / 5 = 0.02 s, as long as the step
    text = repr(found)
    assert "num_workers=0, pin_memory=False" in text and "step idle  83%" in text
    assert "6.00 × as fast as it is" in text


def test_a_step_that_fails_is_the_users_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        report(DataLoader([1, 2, 3]), lambda batch: 1 / 0)


def test_settings_read_like_arguments() -> None:
    assert str(Setting(0)) == "num_workers=0, pin_memory=False"
    assert Setting(2, True).options == {
        "num_workers": 2, "pin_memory": True, "prefetch_factor": 2,
    }  # fmt: skip
