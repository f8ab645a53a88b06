"""Checked mode: ranks that do not make the same call learn of it before anything runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labutils.launch import RankFailure, launch
from labutils.launch.board import ABSENT, FINISHED, RUNNING, Board, Last
from labutils.launch.calls import Call
from labutils.launch.checked import Checker, CollectiveMismatch


def _disagree(work: Callable[[], object], ranks: int = 3) -> str:
    with pytest.raises(RankFailure, match="CollectiveMismatch") as caught:
        launch(work, ranks=ranks, timeout=20)
    return str(caught.value)


def _differently(one: Callable[[], object], others: Callable[[], object]) -> Callable[[], None]:
    def work() -> None:
        (one if dist.get_rank() == 1 else others)()

    return work


_DISAGREEMENTS: dict[str, tuple[Callable[[], object], Callable[[], object], str, str]] = {
    "operation": (
        lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0),
        "all_reduce #1 of float32 (2,), sum", "broadcast #1 of float32 (2,) from rank 0",
    ),
    "shape": (
        lambda: dist.all_reduce(torch.ones(2, 3)), lambda: dist.all_reduce(torch.ones(3, 2)),
        "float32 (2, 3)", "float32 (3, 2)",
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(2).double()),
        "float32 (2,)", "float64 (2,)",
    ),
    "reduction": (
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(2)), "(2,), max", "(2,), sum",
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(2), 1), lambda: dist.broadcast(torch.ones(2), 0),
        "from rank 1", "from rank 0",
    ),
    "barrier": (
        lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(2)),
        "barrier #1", "all_reduce #1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", _DISAGREEMENTS)
def test_disagreement_shows_each_ranks_call_and_line(what: str) -> None:
    one, others, first, second = _DISAGREEMENTS[what]
    text = _disagree(_differently(one, others))
    lines = [line for line in text.splitlines() if line.startswith("  rank ")]
    mine = [line for line in lines if line.startswith("  rank 1: ")]
    assert len(mine) == 1
    assert first in mine[0]
    assert len(lines) >= 2
    assert all(second in line for line in lines if line not in mine)
    assert all(f"{__file__}, line " in line for line in lines)


def test_calls_that_agree_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> list[Any]:
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
        mine = torch.empty(1)
        if rank == 0:  # with a root, two branches are the usual way to write it
            dist.scatter(mine, [torch.tensor([10.0 * i]) for i in range(size)], src=0)
        else:
            dist.scatter(mine, src=0)
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, {"rank": rank})
        if rank == 0:
            dist.barrier()
        else:
            dist.barrier()
        pair = dist.new_group([0, 2])
        value = torch.tensor([1.0])
        if rank != 1:
            dist.all_reduce(value, group=pair)
        handle = dist.all_reduce(value, async_op=True)
        assert handle is not None
        handle.wait()
        uneven = [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
        out = torch.empty(sum(row[rank] for row in uneven))
        dist.all_to_all_single(
            out, torch.full((sum(uneven[rank]),), 1.0), [row[rank] for row in uneven], uneven[rank]
        )
        return [parts[2].tolist(), mine.item(), everything[2], value.item(), out.numel()]

    results = launch(work, ranks=3).results
    for rank, result in enumerate(results):
        size = [6, 9, 12][rank]
        assert result == [[2.0, 2.0], 10.0 * rank, {"rank": 2}, 5.0, size]
    assert capsys.readouterr().out == ""


def test_swapped_tensors_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        weight, bias = torch.ones(4), torch.zeros(4)
        if dist.get_rank() == 0:
            dist.all_reduce(weight)
            dist.all_reduce(bias)
        else:
            dist.all_reduce(bias)
            dist.all_reduce(weight)

    launch(work, ranks=2)
    shown = capsys.readouterr().out
    assert shown.count("Warning: the ranks make this call from different places") == 2
    first = work.__code__.co_firstlineno
    assert f"rank 0: all_reduce #1 of float32 (4,), sum  at {__file__}, line {first + 3}" in shown
    assert f"rank 1: all_reduce #1 of float32 (4,), sum  at {__file__}, line {first + 6}" in shown


def test_swapped_tensors_behind_a_helper_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    def helper(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def work() -> None:
        a, b = torch.ones(4), torch.zeros(4)
        if dist.get_rank() == 0:
            helper(a)
        else:
            helper(b)

    launch(work, ranks=2)
    shown = capsys.readouterr().out
    first = work.__code__.co_firstlineno
    assert (
        f"line {helper.__code__.co_firstlineno + 1}, called from {__file__}, line {first + 3}"
        in shown
    )
    assert f"called from {__file__}, line {first + 5}" in shown


def test_same_line_in_a_loop_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        for tensor in (torch.ones(4), torch.zeros(4)):
            dist.all_reduce(tensor)

    launch(work, ranks=2)
    assert capsys.readouterr().out == ""


def test_switched_off_it_does_not_interfere(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> float:
        value = torch.ones(1)
        if dist.get_rank() == 0:
            dist.all_reduce(value)
        else:
            dist.all_reduce(value)
        return value.item()

    assert launch(work, ranks=2, checked=False).results == [2.0, 2.0]
    assert capsys.readouterr().out == ""


def test_collectives_within_a_subgroup_are_compared_there() -> None:
    def work() -> None:
        pair = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(1 + dist.get_rank()), group=pair)

    text = _disagree(work)
    assert "rank 0: all_reduce #1 of float32 (1,), sum" in text
    assert "rank 2: all_reduce #1 of float32 (3,), sum" in text


def test_a_caught_mismatch_does_not_confuse_the_next_call() -> None:
    def work() -> float:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1 + dist.get_rank()))
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    assert launch(work, ranks=3).results == [3.0] * 3


# -- the board and the checker by themselves ------------------------------------------------------


@pytest.fixture
def boards(tmp_path: Path) -> list[Board]:
    path = str(tmp_path / "board")
    Board.create(path, 3)
    return [Board(path, rank) for rank in range(3)]


def _call(op: str, sequence: int) -> Call:
    call = Call(op, "0", (0, 1, 2), "float32 (1,)", "sum", -1, 4, False, op)
    call.sequence, call.where, call.trail = sequence, "file, line 1", ["file, line 1"]
    return call


def test_nobody_passes_before_the_last_has_come(boards: list[Board]) -> None:
    passed: list[int] = []

    def pass_through(rank: int) -> None:
        checker = Checker(boards[rank], rank, print)
        for sequence in range(1, 200):
            checker.compare(_call("all_reduce", sequence))
        passed.append(rank)

    for board in boards:
        board.set_state(RUNNING)
    threads = [threading.Thread(target=pass_through, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert passed == []
    pass_through(2)
    for thread in threads:
        thread.join(10)
    assert sorted(passed) == [0, 1, 2]


@pytest.mark.parametrize(
    ("state", "word"), [(FINISHED, "has already finished"), (ABSENT, "does not take part")]
)
def test_a_rank_that_will_not_call(boards: list[Board], state: int, word: str) -> None:
    for board in boards:
        board.set_state(RUNNING)
    boards[2].set_state(state)
    with pytest.raises(CollectiveMismatch, match=f"rank 2, which {word}"):
        Checker(boards[0], 0, print).compare(_call("all_reduce", 1))


def test_calls_of_an_earlier_cell_are_forgotten(boards: list[Board]) -> None:
    for board in boards[1:]:
        board.set_state(FINISHED)
        earlier = Checker(board, board.rank, print)
        board.post(0, (earlier.epoch << 32) | 1, b"all_reduce")
    checker = Checker(boards[0], 0, print)
    checker.new_epoch(5)
    with pytest.raises(CollectiveMismatch, match="already finished"):
        checker.compare(_call("all_reduce", 1))


def test_board_keeps_long_texts_apart(boards: list[Board]) -> None:
    boards[0].set_last(Last("x" * 2000, "y", 1, "done"))
    boards[1].set_last(Last("text", "file, line 3", 17, "waiting"))
    assert boards[2].last(1) == Last("text", "file, line 3", 17, "waiting")
    assert boards[1].last(1) == boards[2].last(1)
    assert boards[2].last(2) is None
    boards[2].forget(1)
    assert boards[0].last(1) is None


def test_reader_never_sees_half_an_entry(boards: list[Board]) -> None:
    stop = threading.Event()

    def write() -> None:
        key = 0
        while not stop.is_set():
            key += 1
            boards[0].post(0, key, str(key).encode() * 20)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        for key in range(1, 200_000):
            data = boards[1].posted(0, 0, key)
            if data is not None:
                assert data == str(key).encode() * 20
                seen += 1
            if seen > 200:
                break
    finally:
        stop.set()
        writer.join()
