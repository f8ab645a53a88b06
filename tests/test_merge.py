"""Real DDP in real processes against ``predict``, which records one process and no others."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from merge_ranks import CASES, run_all
from timing_toys import US, kernel, times, toy

from labutils.timing import profiles
from labutils.timing.merge import merge
from labutils.timing.predict import predict
from labutils.virtual.record import Collective, Entry, Graph, Kernel

Found = dict[str, list[tuple[Graph, int, list[int]]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Found]:
    """{case: what each rank recorded} of a world of that size."""
    made: dict[int, Found] = {}

    def run(world: int) -> Found:
        if world not in made:
            folder = tmp_path_factory.mktemp(f"world{world}")
            mp.spawn(run_all, (world, str(folder / "store"), str(folder)), nprocs=world)
            parts = [pickle.loads(Path(folder, f"{r}.pkl").read_bytes()) for r in range(world)]
            made[world] = {name: [part[name] for part in parts] for name in CASES}
        return made[world]

    return run


def predicted(name: str, world: int) -> Any:
    case = dict(CASES[name])
    return predict(case.pop("model")(), gpus=world, profile="DGX-1-V100", **case)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_a_predicted_step_is_that_of_real_ranks(
    name: str, world: int, ranks: Callable[[int], Found]
) -> None:
    found = ranks(world)[name]
    prediction = predicted(name, world)
    trace = merge([graph for graph, _, _ in found], profiles.load("DGX-1-V100"))
    assert not trace.notes
    assert prediction.step_s == pytest.approx(trace.duration, rel=0.02)
    assert prediction.buckets == found[0][2]
    assert {peak for _, peak, _ in found} == {prediction.memory_bytes["peak"]}


def _reduction(rank: int, nbytes: int = 1 << 20) -> Entry:
    work = Kernel("all_reduce", "communication", "float32", 0, nbytes, nbytes)
    group = Collective("all_reduce", (0, 1), "world", 5, asynchronous=True)
    return Entry("collective", "main", rank, 0, "", work, group)


def test_ranks_wait_for_the_slowest() -> None:
    """A collective starts on all ranks when the last of them has come to it."""
    graphs = [
        Graph([kernel((rank + 1) * 50 * US, device=rank), _reduction(rank)], devices=2)
        for rank in range(2)
    ]
    trace = merge(graphs, toy())
    (first,), (second,) = (times(trace, f"rank {r}", "communication") for r in range(2))
    assert first == second and first[0] == 100 * US


def test_events_of_ranks_are_their_own() -> None:
    """Both ranks number their events alike; each waits for its own."""
    graphs = []
    for rank, length in enumerate((30 * US, 70 * US)):
        record = Entry("record", "main", rank, 0, "", None, 1)
        wait = Entry("wait", "main", rank, 4, "", None, 1)
        after = kernel(5 * US, device=rank, stream=4)
        graphs.append(Graph([kernel(length, device=rank), record, wait, after], devices=2))
    trace = merge(graphs, toy())
    assert [times(trace, f"rank {r}", "stream 1")[0][0] for r in range(2)] == [30 * US, 70 * US]


def test_a_rank_without_a_partner_is_noticed() -> None:
    trace = merge([Graph([_reduction(0)], devices=2), Graph([], devices=2)], toy())
    assert "never happened" in trace.notes[0]


@pytest.mark.parametrize(
    ("graphs", "message"),
    [([], "no recording"), ([Graph([kernel(1), kernel(1, device=1)])], "Rank 0 works on 2 GPUs")],
)
def test_what_cannot_be_merged(graphs: list[Graph], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(graphs, toy())
