"""Jobs under torchrun: two nodes on one machine, scripts, and what happens when they fail."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_helpers import driver, wait_until

from labutils.launch import RankFailure, StartError, forked, job, launch, torchrun

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torchrun jobs need Unix sockets")

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1) * dist.get_rank()
dist.all_reduce(value)
print("sum", value.item(), "arguments", sys.argv[1:], __name__, flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("bad data")
if "kill" in sys.argv and dist.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if "hang" in sys.argv:
    print("READY", flush=True)
    time.sleep(100)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_function_on_two_nodes() -> None:
    """A rank of the second node has another rank than local rank, and nothing else listens."""
    factor = 3

    def work() -> tuple[Any, ...]:
        value = torch.ones(1) * dist.get_rank() * factor
        dist.all_reduce(value)
        listening = {
            c.laddr.ip
            for process in (psutil.Process(), psutil.Process(os.getppid()))  # it and its agent
            for c in process.net_connections()
            if c.status == "LISTEN"
        }
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
        return (value.item(), *(os.environ[name] for name in names), sorted(listening))

    run = launch(work, ranks=2, nodes=2)
    assert [result[0] for result in run.results] == [18.0] * 4
    assert [result[1] for result in run.results] == ["0", "1", "2", "3"]
    assert [result[2] for result in run.results] == ["0", "1", "0", "1"]
    assert [result[3] for result in run.results] == ["0", "0", "1", "1"]
    assert all(set(result[4]) <= {"127.0.0.1", "::1"} for result in run.results)
    assert {span.device for span in run.trace.spans} == {f"rank {i}" for i in range(4)}


def test_agents_that_are_started_as_plain_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems where forking is not safe."""
    monkeypatch.setenv("LABUTILS_START", "spawn")
    run = launch(lambda: os.environ["GROUP_RANK"], ranks=1, nodes=2)
    assert run.results == ["0", "1"]


def test_script_with_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = torchrun(str(script), "--lr", 0.1, ranks=2)
    line = "sum 1.0 arguments ['--lr', '0.1'] __main__"
    assert run.logs == [line + "\n"] * 2
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] {line}" for r in range(2)]


def test_script_that_fails_fails_the_cell(script: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        torchrun(str(script), "fail", ranks=2)
    text = str(caught.value)
    assert text.startswith("Rank 1 failed: ValueError: bad data")
    assert re.search(r"train\.py, line 9\n    raise ValueError\(\"bad data\"\)", text)
    assert "rank 0: was waiting in barrier" in text


def test_rank_killed_on_the_second_node(script: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        torchrun(str(script), "kill", ranks=2, nodes=2)
    assert str(caught.value).startswith("Rank 2 died: it was ended by SIGKILL (signal 9)")
    assert caught.value.rank == 2
    assert time.monotonic() - start < 60


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("victim", ["notebook", "agent"])
def test_no_process_outlives_the_notebook_or_its_agent(script: Path, victim: str) -> None:
    code = f"""
        from labutils.launch import torchrun
        torchrun({str(script)!r}, "hang", ranks=2, timeout=None)
    """
    with driver(code) as notebook:
        others = [psutil.Process(pid) for pid in notebook.others()]
        agents = [p for p in others if len(p.children()) == 2]
        assert len(agents) == 1
        assert len(others) == 4  # what ends all with the notebook, an agent, two ranks
        (notebook.process if victim == "notebook" else agents[0]).send_signal(signal.SIGKILL)
        gone = 2.0 if victim == "notebook" else 20.0  # first the failure is looked at
        assert wait_until(lambda: not notebook.others(), gone), notebook.others()


def test_script_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="no script"):
        torchrun("nowhere.py")


def test_torchrun_that_does_not_come_up(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "rendezvous", lambda *_: ["--nonsense"])
    with pytest.raises(StartError, match="unrecognized arguments: --nonsense|error"):
        torchrun(str(script), ranks=2)
    monkeypatch.setenv("LABUTILS_START", "spawn")
    monkeypatch.setattr(
        job.JobRanks, "_command", lambda self, path: [sys.executable, "-c", "import nothing_here"]
    )
    with pytest.raises(StartError, match="No module named 'nothing_here'"):
        torchrun(str(script), ranks=2)
