"""How long a batch takes with W workers: a model of four numbers, fitted from few measurements.

A batch needs ``load_s`` seconds in a worker, of which ``load_cpu_s`` on a core, and ``step_s``
seconds in the training step.  W workers make W batches at a time, but no more than the cores allow,
and every batch costs ``overhead_s`` to be handed over::

    t(W) = max(load_s / W + overhead_s, (load_cpu_s + step_cpu_s) / cores, step_s)
    t(0) = load_s + step_s                    # in turns, in a loop that waits for each step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labutils import hardware

MOST_WORKERS = 64
"""More are not considered."""
SLACK = 0.02
"""Workers that make a batch faster by less than this share are not worth having."""


@dataclass(frozen=True, slots=True)
class LoadingModel:
    """Seconds per batch as a function of the number of workers; all times in seconds."""

    load_s: float
    step_s: float
    overhead_s: float = 0.0
    load_cpu_s: float = 0.0
    """0: loading only waits (for a disk, a network)."""
    step_cpu_s: float = 0.0
    cores: float = 1.0
    """Cores that the process and its workers may keep busy."""

    def seconds(self, workers: int) -> float:
        """Seconds per batch with so many workers."""
        if workers == 0:
            return self.load_s + self.step_s
        made = self.load_s / workers + self.overhead_s
        return max(made, (self.load_cpu_s + self.step_cpu_s) / self.cores, self.step_s)

    def workers(self, most: int = MOST_WORKERS) -> int:
        """The fewest workers that are as fast as any number up to ``most`` (to within SLACK)."""
        best = min(map(self.seconds, range(most + 1)))
        return next(n for n in range(most + 1) if self.seconds(n) <= best * (1 + SLACK))

    def idle(self, workers: int) -> float:
        """Share of the time in which the step has nothing to do."""
        return 1 - self.step_s / self.seconds(workers)


def fit(
    loading: Mapping[int, float], step_s: float, load_cpu_s: float = 0.0, cores: float | None = None
) -> LoadingModel:
    """The model from two measurements of loading alone.

    Args:
        loading: seconds per batch by number of workers, for two numbers, 1 or more.
        step_s: seconds of the step on a batch that is there already.
        load_cpu_s: seconds of CPU per batch.
        cores: that may be used; those of this machine by default.

    Raises:
        ValueError: not two different numbers of workers.
    """
    if len(loading) != 2 or min(loading) < 1:
        raise ValueError(
            "the model is fitted from loading times with two numbers of workers, each 1 or more, "
            f"not {sorted(loading)}."
        )
    (few, slow), (many, fast) = sorted(loading.items())
    load = (slow - fast) / (1 / few - 1 / many)
    load = min(max(load, 0.0), slow * few)
    cores = hardware.usable_cores() if cores is None else cores
    return LoadingModel(load, step_s, max(0.0, slow - load / few), load_cpu_s, cores=cores)


def usable_workers(load_s: float, load_cpu_s: float, ranks: int = 1) -> int:
    """Workers that keep the cores of one of ``ranks`` processes on this machine busy.

    A worker that mostly waits uses a fraction of a core, so there may be more workers than cores.
    """
    cores = hardware.usable_cores() / ranks
    busy = min(1.0, load_cpu_s / load_s) if load_s else 1.0
    return int(max(1, min(MOST_WORKERS, round(cores / max(busy, 1e-3)))))
