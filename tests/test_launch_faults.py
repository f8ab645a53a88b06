"""Faults: whatever a rank, the notebook or the machine does, it ends soon, and is said in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_helpers import driver, wait_until

from labutils.launch import (
    RankFailure,
    RankTimeout,
    StartError,
    board,
    launch,
    output,
    processes,
    report,
)
from labutils.launch.report import Ended

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


def _on_rank(number: int, action: Callable[[], object]) -> Callable[[], None]:
    """A function in which one rank does ``action`` while the others wait in a collective."""

    def work() -> None:
        if dist.get_rank() == number:
            action()
        dist.all_reduce(torch.ones(3))

    return work


def _fails(
    work: Callable[[], object], timeout: float = 20.0, checked: bool = True, ranks: int = 3
) -> RankFailure:
    """The failure of ``work``; it must come well before the time limit, and leave no process."""
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        launch(work, ranks=ranks, timeout=timeout, checked=checked)
    assert time.monotonic() - start < 15
    assert caught.value.run.failure is caught.value
    assert not _forked_ranks()
    return caught.value


def _forked_ranks() -> list[psutil.Process]:
    return psutil.Process(processes.fork_server().pid).children(recursive=True)


@pytest.mark.parametrize("timeout", [20.0, None])
def test_one_step_of_ddp_more_than_the_others(timeout: float | None) -> None:
    def steps() -> None:
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        for _ in range(2 + (dist.get_rank() == 1)):
            ddp(torch.ones(2, 4)).mean().backward()

    with pytest.raises(RankFailure) as caught:
        launch(steps, ranks=2, timeout=timeout)
    assert not isinstance(caught.value, RankTimeout)
    text = str(caught.value)
    assert text.startswith("Rank 1 waits in all_reduce of bucket 0 #3")
    assert "for rank 0, which has finished after #2" in text
    assert "ddp(torch.ones(2, 4)).mean().backward()" in text


def test_a_slow_rank_is_not_taken_for_one_that_never_comes() -> None:
    def steps() -> int:
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        for step in range(2):
            if dist.get_rank() == 0 and step == 1:
                time.sleep(1.5)
            ddp(torch.ones(2, 4)).mean().backward()
        return step

    assert launch(steps, ranks=2).results == [1, 1]


@pytest.mark.parametrize("checked", [True, False])
def test_exception_on_one_rank(checked: bool) -> None:
    failure = _fails(_on_rank(1, lambda: [][1]), checked=checked)
    text = str(failure)
    assert text.startswith("Rank 1 failed: IndexError: list index out of range")
    assert failure.rank == 1
    assert f"{__file__}, line" in text
    assert "[][1]" in text
    assert "labutils/launch" not in text.replace(__file__, "")
    assert "rank 0: was " in text
    assert "all_reduce #1 of float32 (3,), sum" in text


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
        (os.abort, "SIGABRT"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os._exit(0), "exit code 0"),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_death_of_one_rank(action: Callable[[], object], word: str, checked: bool) -> None:
    failure = _fails(_on_rank(2, action), checked=checked)
    first = str(failure).splitlines()[0]
    assert first.startswith("Rank 2 died: ")
    assert word in first
    assert failure.rank == 2


def test_crash_shows_the_line() -> None:
    text = str(_fails(_on_rank(0, lambda: os.kill(os.getpid(), signal.SIGSEGV))))
    assert "It was at" in text
    assert f"{__file__}, line" in text


def test_sys_exit_is_a_failure() -> None:
    assert "exit code 5" in str(_fails(_on_rank(1, lambda: sys.exit(5))))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_that_nobody_gave_is_a_failure(ranks: int) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    text = str(_fails(work, ranks=ranks))
    assert text.startswith("Rank 0 failed: KeyboardInterrupt")
    assert "raise KeyboardInterrupt" in text


def test_rank_that_sleeps_while_others_wait() -> None:
    with pytest.raises(RankTimeout) as caught:
        launch(_on_rank(1, lambda: time.sleep(100)), ranks=3, timeout=1.5)
    text = str(caught.value)
    assert text.startswith("Ranks 0 and 2 waited more than 1.5 s in all_reduce #1")
    assert "rank 1 did not call it" in text.splitlines()[0]
    assert "time.sleep(100)" in text
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.rank is None


def test_rank_blocked_in_compiled_code_still_shows_its_line() -> None:
    """Without checking, the others hang in gloo: no Python code runs there to ask."""
    with pytest.raises(RankTimeout) as caught:
        launch(_on_rank(1, lambda: time.sleep(100)), ranks=3, timeout=1.5, checked=False)
    assert str(caught.value).count("dist.all_reduce(torch.ones(3))") == 2


def test_everybody_computes_without_a_sign_of_life() -> None:
    with pytest.raises(RankTimeout, match="Nothing moved on for 1 s"):
        launch(lambda: time.sleep(100), ranks=2, timeout=1)


@pytest.mark.parametrize("lines", [["waiting"], ["waiting", "for whom?"]])
def test_printing_the_same_for_ever_is_no_progress(
    lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def poll() -> None:
        while True:
            print(*lines, sep="\n")

    with pytest.raises(RankTimeout, match="Nothing moved on for 1 s.* nothing new was printed"):
        launch(poll, ranks=2, timeout=1, collect=True)
    shown = capsys.readouterr().out
    assert shown.count("\n") == 2 * (output.SHOWN_LINES + 1 + output.TAIL_LINES)
    assert "lines are only in run.logs[1]" in shown


def test_a_chatty_run_may_take_longer_than_the_limit() -> None:
    def train() -> str:
        for step in range(250):
            print(f"step {step}\nsaved")
            time.sleep(0.01)
        return "done"

    assert launch(train, ranks=1, timeout=1, collect=True).results == ["done"]


def test_a_run_that_gets_on_may_take_longer_than_the_limit() -> None:
    def work() -> str:
        for _ in range(6):
            time.sleep(0.4)
            dist.barrier()
        for _ in range(3):
            time.sleep(0.6)
            print("still here")
        return "done"

    assert launch(work, ranks=2, timeout=1.2).results == ["done", "done"]


@pytest.mark.parametrize("checked", [True, False])
def test_rank_that_returns_early(checked: bool) -> None:
    def work() -> None:
        dist.barrier()
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(3))

    text = str(_fails(work, timeout=2.0, checked=checked))
    assert "all_reduce #2" in text
    assert ("waits for rank 1, which has already finished" in text) == checked
    assert "rank 1: had finished" in text


def test_consequences_come_after_the_cause() -> None:
    """A closed connection is often reported before the exception that closed it."""

    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 2:
            dist.destroy_process_group()
            time.sleep(0.7)
            raise ZeroDivisionError("the cause")
        dist.all_reduce(torch.ones(3))

    failure = _fails(work, checked=False)
    assert failure.rank == 2
    assert str(failure).startswith("Rank 2 failed: ZeroDivisionError: the cause")
    assert "rank 0: was stopped because of it" in str(failure)


def test_first_failure_ranks_causes_before_consequences() -> None:
    def raised(rank: int, time_ns: int, secondary: bool) -> Ended:
        error = {"type": str(rank), "message": "", "frames": [], "secondary": secondary}
        return Ended(rank, "error", time_ns, error)

    ends = [
        raised(0, 1, True),
        Ended(1, "died", 3, code=-9),
        raised(2, 2, False),
        Ended(3, "hangs"),
    ]
    assert report.first_failure(ends) is ends[2]
    assert report.first_failure([ends[0], ends[1]]) is ends[1]
    assert report.first_failure([ends[3]]) is None


def test_exceptions_that_come_after_each_other_are_both_shown() -> None:
    def action() -> None:
        try:
            _ = os.environ["LABUTILS_NO_SUCH_VARIABLE"]
        except KeyError as error:
            raise ValueError("no key") from error

    text = str(_fails(_on_rank(0, action)))
    assert "ValueError: no key" in text
    assert "That came after KeyError" in text


@LINUX
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_no_process_outlives_the_notebook(how: signal.Signals, start: str) -> None:
    code = """
        import os, signal, time
        from labutils.launch import launch
        def work():
            if os.environ["RANK"] == "0":
                import torch
                loader = torch.utils.data.DataLoader(range(10**9), num_workers=1)
                for i, _ in enumerate(loader):
                    if i == 10:
                        print("READY", flush=True)
            while True:
                pass
        launch(work, ranks=2, timeout=None)
    """
    with driver(code, LABUTILS_START=start) as notebook:
        assert len(notebook.others()) >= 3
        notebook.process.send_signal(how)
        assert wait_until(lambda: not notebook.others(), 2.0), notebook.others()


@LINUX
def test_a_copy_of_the_notebooks_sockets_keeps_no_rank_alive() -> None:
    """A child that the notebook forks (DataLoader workers) outlives it for a while."""
    code = """
        import os, time, warnings
        warnings.simplefilter("ignore")
        from labutils.launch import launch
        run = launch(lambda: time.sleep(60), ranks=2, block=False)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        print("READY", child, flush=True)
        time.sleep(60)
    """
    with driver(code) as notebook:
        children = psutil.Process(notebook.process.pid).children()
        fork = next(
            c for c in children if not c.children() and "server" not in "".join(c.cmdline())
        )
        notebook.process.kill()
        assert wait_until(lambda: notebook.others() == [fork.pid], 2.0), notebook.others()


@LINUX
def test_what_killed_notebooks_left_in_shared_memory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "folder", lambda: str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {f"labutils-ranks-{gone.pid}-old": 100, f"labutils-ranks-{gone.pid}-new": 0}
    names |= {f"labutils-ranks-{os.getpid()}-mine": 100, "labutils-ranks-odd-name": 100}
    for name, age in names.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    made = board.own_folder()
    assert {path.name for path in tmp_path.iterdir()} == {*names, made.name} - {
        f"labutils-ranks-{gone.pid}-old"
    }


def test_two_notebooks_do_not_meet() -> None:
    code = """
        import os, time
        from labutils.launch import launch
        import torch, torch.distributed as dist
        def work():
            t = torch.ones(1)
            for _ in range(20):
                dist.all_reduce(t, op=dist.ReduceOp.MAX)
                time.sleep(0.02)
            return t.item()
        assert launch(work, ranks=2).results == [1.0, 1.0]
        print("READY", flush=True)
        time.sleep(60)
    """
    with driver(code) as one, driver(code) as two:
        one.process.kill()
        assert wait_until(lambda: not one.others(), 2.0)
        assert two.others()  # its fork server


def test_server_that_dies_is_replaced() -> None:
    run = launch(lambda: time.sleep(60), ranks=2, block=False)
    os.kill(processes.fork_server().pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="SIGKILL"):
        run.wait(20)
    assert launch(dist.get_rank, ranks=2).results == [0, 1]


def test_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    processes.close_fork_server()
    monkeypatch.setattr(
        processes, "python", lambda *_: [sys.executable, "-c", "import nothing_here"]
    )
    with pytest.raises(StartError, match="No module named 'nothing_here'"):
        launch(dist.get_rank, ranks=2)
    monkeypatch.undo()
    assert launch(dist.get_rank, ranks=2).results == [0, 1]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few directories, and for nothing in them."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    (tmp_path / "filler").write_bytes(bytes(4096))
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_full_disk_for_the_run_directory(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABUTILS_RUNS", str(full_disk))
    run = launch(_on_rank(0, lambda: None), ranks=2)
    assert run.results == [None, None]
    assert run.trace.spans == []


def test_run_directory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABUTILS_RUNS", "/dev/null/runs")
    assert launch(dist.get_rank, ranks=2).results == [0, 1]


def test_no_room_for_the_board_is_said(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labutils.launch.board.folder", lambda: str(full_disk))
    with pytest.raises(OSError, match="no room for the ranks' shared page"):
        launch(dist.get_rank, ranks=2)


def test_exit_codes_in_words() -> None:
    assert "ran out of memory" in report.explain_exit(-9)
    assert "different shapes" in report.explain_exit(-6)
    assert "exit code 3" in report.explain_exit(3)
    assert "signal 99" in report.explain_exit(-99)
