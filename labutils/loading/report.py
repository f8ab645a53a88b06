"""``lab.loader_report``: where a training loop's time goes, and what its loader should be told.

Everything is measured on twins of the user's loader, in workers or on a copy of the data set, so
that the loader's own state stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from labutils import hardware
from labutils.exercises import Note
from labutils.loading import measure
from labutils.loading.measure import Measured, Setting, Step
from labutils.loading.model import MOST_WORKERS, SLACK, LoadingModel, usable_workers
from labutils.loading.sentences import LoaderError, explain

WORTH = 0.03
"""A setting must be faster by this share to be recommended over a simpler one."""
_ROUNDS = 8
_SHARE_OF_SHM = 0.8


@dataclass
class Findings:
    """What was measured of a loader and a step, in seconds per batch."""

    samples: int = 1
    """In a batch; 1 where the loader does not batch (``batch_size=None``)."""
    batches: bool = True
    nbytes: int = 0
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    as_is: Measured | None = None
    loading: Measured | None = None
    """Loading alone, by one worker (or in the process, where no worker can run)."""
    model: LoadingModel | None = None
    runs: dict[Setting, Measured] = field(default_factory=dict)
    best: Setting = field(default_factory=lambda: Setting(0))
    persistent: bool = False
    notes: list[str] = field(default_factory=list)


class LoaderReport(Note):
    """The report: text in any front end, figures as attributes.

    ``recommended`` holds arguments for DataLoader; ``findings`` all that was measured.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        best = findings.best
        self.recommended: dict[str, Any] = {"num_workers": best.num_workers,
                                            "pin_memory": best.pin_memory}  # fmt: skip
        if best.num_workers:
            self.recommended["prefetch_factor"] = best.prefetch_factor or 2
            self.recommended["persistent_workers"] = findings.persistent
        what = f"{findings.samples} samples a batch" if findings.batches else "items, not batched"
        title = f"loader_report: {what}, {_bytes(findings.nbytes)}"
        super().__init__(title, _rows(findings, self.recommended))

    @property
    def idle(self) -> float:
        """Share of the loop, as the loader is now, in which the step had nothing to do."""
        as_is = self.findings.as_is
        return 0.0 if as_is is None else _idle(self.findings, as_is)


def loader_report(
    loader: DataLoader[Any], step: Step, *, seconds: float = 8.0, ranks: int = 1
) -> LoaderReport:
    """Measure the user's own loader and training step, and recommend settings with the evidence.

    Args:
        loader: any ``torch.utils.data.DataLoader``.  It is not used up or changed, nor are random
            numbers; its sampler is copied, and the data set is read in workers.
        step: called as ``step(batch)``; it really trains, some hundred times, so give a copy of the
            model where that matters.
        seconds: about how long to measure.
        ranks: how many such processes share this machine.

    Raises:
        TypeError: ``loader`` is no DataLoader.
        ValueError: it yields nothing, its sampler cannot be copied, or ``ranks`` or ``seconds``
            is impossible.
        LoaderError: it fails for a reason that is known, also without workers.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            "loader_report needs a torch.utils.data.DataLoader, but got "
            f"{type(loader).__name__}: wrap the data set in one."
        )
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"loader_report needs at least one rank, not {ranks!r}.")
    if not (isinstance(seconds, int | float) and 0 < seconds < 3600):
        raise ValueError(
            f"loader_report cannot measure in {seconds!r} seconds: give it more than 0, and less "
            "than an hour."
        )
    if not callable(step):
        raise TypeError(f"step must be a function that takes a batch, not {step!r}.")
    with measure.undisturbed():
        return LoaderReport(_Examination(loader, step, seconds / _ROUNDS, ranks).findings)


class _Examination:
    """Measures one loader, from the simple to the recommended."""

    def __init__(self, loader: DataLoader[Any], step: Step, seconds: float, ranks: int) -> None:
        self.loader, self.step, self.seconds, self.ranks = loader, step, seconds, ranks
        self.findings = Findings(batches=loader.batch_sampler is not None)
        self._copy = measure.independent(loader.dataset)
        pins = loader.pin_memory and torch.accelerator.is_available()
        if loader.pin_memory and not pins:
            self.findings.notes.append("pin_memory=True has no effect: there is no accelerator")
        own = Setting(loader.num_workers, pins, loader.prefetch_factor)
        self.most = MOST_WORKERS
        self._look_at_loading(own)
        self._try(own)
        self.findings.as_is = self.findings.runs.get(own)
        self._choose_workers(own.pin_memory)
        self._choose_the_rest()

    def _look_at_loading(self, own: Setting) -> None:
        """Loading alone and the step alone; from these the model."""
        found = self.findings
        inside: Measured | None = None
        if self._copy is not None:
            inside, batch = self._run(Setting(0), None)
            self._weigh(batch)
        if self.most:
            try:
                found.loading, batch = self._run(Setting(1, own.pin_memory, 2), None)
                self._weigh(batch)
            except LoaderError as error:
                self._without_workers(str(error))
        if found.loading is None:
            if inside is None:
                raise LoaderError(found.notes[-1])
            found.loading = inside
        found.step_s, found.step_cpu_s = measure.alone(self.step, batch, self.seconds)
        one = found.loading
        load_s = one.load_s if inside is None else min(one.load_s, inside.load_s)
        load_s = max(load_s - one.queued_s, one.load_cpu_s)
        if one.queued_s > 0.2 * one.load_s:
            found.notes.append(
                f"a worker waited {one.queued_s / one.load_s:.0%} of its time for a free core: "
                "other programs keep this machine busy, and it is faster when they do not"
            )
        found.model = LoadingModel(
            load_s, found.step_s, max(0.0, one.seconds - one.load_s), one.load_cpu_s,
            found.step_cpu_s, hardware.usable_cores() / self.ranks,
        )  # fmt: skip
        self.most = min(self.most, 2 * usable_workers(load_s, one.load_cpu_s, self.ranks))

    def _weigh(self, batch: Any) -> None:
        found = self.findings
        if found.batches:  # those of this batch, which may be a short one, only if nobody says
            found.samples = self.loader.batch_size or max(found.samples, measure.samples(batch))
        found.nbytes = max(found.nbytes, measure.nbytes(batch))
        shared = hardware.shared_memory()
        if shared is not None and found.nbytes and self.most:
            self.most = min(self.most, int(_SHARE_OF_SHM * shared / (2 * found.nbytes)))
            if not self.most:
                self._without_workers(
                    f"/dev/shm has {_bytes(shared)}, too little for two batches of "
                    f"{_bytes(found.nbytes)}, which is what one worker needs: make it larger "
                    "(docker run --shm-size=2g) or the batches smaller."
                )

    def _without_workers(self, why: str) -> None:
        self.most = 0
        self.findings.notes.append(why)

    def _choose_workers(self, pinned: bool) -> None:
        """From the model's answer on: more while it helps, fewer while it costs nothing."""
        model = self.findings.model
        assert model is not None
        first = model.workers(self.most)
        for workers in dict.fromkeys([0, min(1, self.most), first]):
            self._try_workers(workers, pinned)
        workers = max(first, 1)
        while workers < self.most and self._best().num_workers == workers:
            workers = min(self.most, max(workers + 1, round(1.5 * workers)))
            self._try_workers(workers, pinned)
        if 2 < first == self._best().num_workers:
            self._try_workers(first - 1, pinned)

    def _choose_the_rest(self) -> None:
        best = self._best()
        if torch.accelerator.is_available():
            self._try(Setting(best.num_workers, not best.pin_memory, best.prefetch_factor))
            best = self._best()
        if best.num_workers and _idle(self.findings, self.findings.runs[best]) > 0.05:
            self._try(Setting(best.num_workers, best.pin_memory, 4))
        self.findings.best = self._best()
        self._judge_start()

    def _judge_start(self) -> None:
        """Workers that start anew in each epoch are worth keeping if that takes long."""
        found = self.findings
        run = found.runs.get(found.best)
        streams = isinstance(
            self.loader.dataset, IterableDataset
        )  # asking its length leaves a mark
        if run is not None and found.best.num_workers and not streams:
            found.persistent = run.start_s > 0.02 * len(self.loader) * run.seconds

    def _best(self) -> Setting:
        """The simplest setting that is as fast as any, or nearly."""
        runs = self.findings.runs
        fastest = min(run.seconds for run in runs.values())
        good = [s for s, run in runs.items() if run.seconds <= fastest * (1 + WORTH)]
        return min(good, key=lambda s: (s.num_workers, s.prefetch_factor or 0, s.pin_memory))

    def _try_workers(self, workers: int, pinned: bool) -> None:
        self._try(Setting(workers, pinned, 2 if workers else None))

    def _try(self, setting: Setting) -> None:
        impossible = setting.num_workers > self.most
        if setting in self.findings.runs or (impossible and not self.most):
            return
        if setting.num_workers == 0 and self._copy is None:
            return
        try:
            self.findings.runs[setting], _ = self._run(setting, self.step)
        except LoaderError as error:
            self.findings.notes.append(f"{setting}: {error}")
            self.most = min(self.most, max(0, setting.num_workers - 1))

    def _run(self, setting: Setting, step: Step | None) -> tuple[Measured, Any]:
        dataset = self._copy if setting.num_workers == 0 else None
        return measure.run(self.loader, setting, step, self.seconds, dataset)


def _rows(found: Findings, recommended: dict[str, Any]) -> list[tuple[str, str]]:
    loading, as_is = found.loading, found.as_is
    assert loading is not None
    rows = [
        ("load", f"{_ms(loading.load_s)} for a batch by one worker ({_ms(loading.load_cpu_s)} of "
                 f"CPU time, {_ms(min(loading.collate_s, loading.load_s))} collating)"),
        ("step", f"{_ms(found.step_s)} on a batch that is there ({_ms(found.step_cpu_s)} of CPU)"),
        ("this is", _verdict(found)),
    ]  # fmt: skip
    if as_is is not None:
        rows.append(("as it is", _line(found, as_is)))
    rows.append(("measured", "\n".join(_line(found, run) for run in _sorted(found))))
    text = ", ".join(f"{name}={value}" for name, value in recommended.items())
    rows.append(("recommended", text + _gain(found)))
    return rows + [("note", note) for note in found.notes]


def _verdict(found: Findings) -> str:
    loading = found.loading
    assert loading is not None
    if loading.load_s < 0.02 * found.step_s or loading.load_s < 5e-4:
        return "hardly any loading: workers would cost more than they bring"
    if loading.load_cpu_s + loading.queued_s < 0.5 * loading.load_s:
        kind = "waiting for a disk or a network: workers that wait need no core of their own"
    else:
        kind = "work for a CPU: workers help as far as there are cores"
    longer = "longer" if loading.load_s > found.step_s else "shorter"
    return f"loading {longer} than the step; {kind}"


def _line(found: Findings, run: Measured) -> str:
    rate, what = found.samples / run.seconds, "samples" if found.batches else "items"
    return f"{run.setting!s:<55} {rate:9,.0f} {what}/s, step idle {_idle(found, run):4.0%}"


def _sorted(found: Findings) -> list[Measured]:
    return sorted(found.runs.values(), key=lambda run: (run.setting.num_workers, -run.seconds))


def _gain(found: Findings) -> str:
    if found.as_is is None or found.best not in found.runs:
        return ""
    factor = found.as_is.seconds / found.runs[found.best].seconds
    return f"   ({factor:.2f} × as fast as it is)" if factor > 1 + SLACK else "   (as it is)"


def _idle(found: Findings, run: Measured) -> float:
    return max(0.0, 1 - found.step_s / run.seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 1 << 20 else f"{count / 2**10:.3g} KiB"


__all__ = ["Findings", "LoaderReport", "explain", "loader_report"]
