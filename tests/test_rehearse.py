"""Rehearsals of jobs over nodes: the lines, the restarts, what is lost, and who is named."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_helpers import driver, wait_until

from labutils.launch import network, nodes, story
from labutils.launch.nodes import RehearsalFailed, rehearse
from labutils.launch.story import Fault, Place, Round

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")

SCRIPT = '''
"""A job that counts: the sum over all ranks of 1, step after step, with checkpoints."""
import os, sys, time
import torch, torch.distributed as dist

path, last, every = sys.argv[1], int(sys.argv[2]), 3
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
box = [int(open(path).read()) if rank == 0 and os.path.exists(path) else 0]
dist.broadcast_object_list(box)
if rank == 0 and box[0]:
    print(f"resumed at step {box[0]}")
with open(f"{path}.log", "a") as log:
    for step in range(box[0] + 1, last + 1):
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world
        if rank == 0:
            log.write(f"{step}\\n")
            log.flush()
            print(f"step {step} of {world} ranks")
            if step % every == 0:
                with open(path + ".new", "w") as file:
                    file.write(str(step))
                os.replace(path + ".new", path)
        if "fail" in sys.argv and step == 2 and rank == 1:
            raise ValueError("bad data")
        if "hang" in sys.argv:
            time.sleep(100)
dist.destroy_process_group()
'''


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "count.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "count.py"


def steps_done(folder: Path) -> list[int]:
    """What rank 0 has written down before it said so, across all rounds."""
    return [int(line) for line in (folder / "state.log").read_text().split()]


def test_two_nodes_and_the_lines_for_their_terminals(script: str) -> None:
    said: list[str] = []
    done = rehearse(script, "state", 2, nodes=2, ranks=2, show=said.append)
    assert done.lines[0] == done.lines[1]
    words = shlex.split(done.lines[0])
    start = words.index("torchrun")
    assert all("=" in word for word in words[:start])
    assert words[-3:] == ["count.py", "state", "2"]
    assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"} <= set(words)
    assert said[:2] == [f"node {n} $ {done.lines[n]}\n" for n in (0, 1)]
    (only,) = done.rounds
    assert only.world_size == 4 and only.steps == [1, 2]
    assert sorted(only.places) == [0, 1, 2, 3]
    assert {place.node for place in only.places.values()} == {0, 1}
    assert [text for _, rank, text in done.printed if rank == 0] == [
        "step 1 of 4 ranks",
        "step 2 of 4 ranks",
    ]


def test_the_line_is_what_torchrun_itself_understands(script: str) -> None:
    """The same words, with one node, in a real torchrun."""
    done = rehearse(script, "state", 1, nodes=1, ranks=1, show=None)
    words = shlex.split(done.lines[0])
    words = [w for w in words[words.index("torchrun") + 1 :] if not w.startswith("--rdzv-end")]
    words = [w for w in words if not w.startswith(("--rdzv-conf", "--local-addr"))]
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-endpoint=localhost:0", *words]
    done_again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done_again.returncode == 0, done_again.stderr


def test_a_rank_dies_and_the_steps_since_the_checkpoint_are_lost(
    script: str, tmp_path: Path
) -> None:
    done = rehearse(script, "state", 12, nodes=2, ranks=2, max_restarts=2, show=None,
                    faults={"rank 3 dies": 8})  # fmt: skip
    assert [r.world_size for r in done.rounds] == [4, 4]
    assert done.rounds[0].steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert done.rounds[1].start == 6 and done.rounds[1].steps == [7, 8, 9, 10, 11, 12]
    assert done.lost == [2]
    assert sorted(steps_done(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 7, 8, 8, 9, 10, 11, 12]
    text = repr(done)
    assert "(node 1, local rank 1) was killed after step 8. Lost: steps 7 and 8" in text
    assert "14 steps were computed, 2 of them again." in text


@pytest.mark.skipif(bool(network.missing()), reason=network.missing())
def test_a_node_is_lost_and_comes_back_and_ranks_are_renumbered(script: str) -> None:
    """In namespaces, where nodes are sorted by their names."""
    done = rehearse(
        script, "state", 14, nodes="1:3", ranks=1, max_restarts=2, show=None,
        faults={"node 1 dies": 5, "node 1 joins": 10}, network="namespaces",
    )  # fmt: skip
    assert [r.world_size for r in done.rounds] == [3, 2, 3]
    assert [r.nodes for r in done.rounds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert done.rounds[0].places == {0: Place(0, 0), 1: Place(1, 0), 2: Place(2, 0)}
    assert done.rounds[1].places == {0: Place(0, 0), 1: Place(2, 0)}
    assert done.lost == [2, 1]
    assert "Rank 2 (node 2) is rank 1 now." in repr(done)
    assert [name for _, name in done.moments] == ["node 1 dies", "node 1 joins"]
    figure = done.figure()
    assert [len(line.get_xdata()) for line in figure.axes[0].lines[:3]] == [5, 7, 5]


def test_an_error_without_restarts_names_the_rank(script: str) -> None:
    with pytest.raises(RehearsalFailed) as caught:
        rehearse(script, "state", 5, "fail", nodes=2, ranks=1, show=None)
    text = str(caught.value)
    assert "rank 1 (node" in text and "local rank 0): ValueError: bad data" in text
    assert caught.value.rehearsal.rounds[0].world_size == 2


def test_a_fault_without_restarts_ends_the_job(script: str) -> None:
    with pytest.raises(RehearsalFailed, match=r"Rank 1 \(node 1, local rank 0\) was killed after"):
        rehearse(script, "state", 5, nodes=2, ranks=1, show=None, faults={"rank 1 dies": 2})


def test_a_job_that_says_nothing_is_ended(script: str) -> None:
    with pytest.raises(RehearsalFailed, match="no line came from any rank for 4 s"):
        rehearse(script, "state", 5, "hang", nodes=1, ranks=1, show=None, timeout=4)


@pytest.mark.skipif(bool(network.missing()), reason=network.missing())
def test_the_loss_of_the_node_that_hosts_the_rendezvous_is_the_end(script: str) -> None:
    with pytest.raises(RehearsalFailed, match="node 0 hosted the rendezvous") as caught:
        rehearse(script, "state", 8, nodes="1:2", ranks=1, max_restarts=2, network="namespaces",
                 show=None, faults={"node 0 dies": 3})  # fmt: skip
    assert "Traceback" not in str(caught.value)


def test_a_fault_whose_step_never_comes_is_said(script: str) -> None:
    done = rehearse(script, "state", 2, nodes=1, ranks=1, show=None, faults={"rank 0 dies": 99})
    assert str(done.missed[0]) == "rank 0 dies"
    assert "'rank 0 dies' did not happen: rank 0 printed no line 'step 99 …'." in repr(done)


def test_an_interrupt_leaves_nothing(script: str) -> None:
    def at_work() -> set[Any]:
        return {rank for child in psutil.Process().children() for rank in child.children()}

    def press_at_step_1(text: str) -> None:
        if "step 1" in text:
            os.kill(os.getpid(), signal.SIGINT)

    before = at_work()  # of other tests
    with pytest.raises(KeyboardInterrupt):
        rehearse(script, "state", 5, "hang", nodes=2, ranks=1, show=press_at_step_1)
    assert wait_until(lambda: not at_work() - before, 15.0)


@pytest.mark.parametrize("victim", ["notebook", "agent"])
def test_nothing_outlives_the_notebook(script: str, victim: str) -> None:
    code = f"""
        import os
        from labutils.launch.nodes import rehearse

        os.chdir({os.getcwd()!r})
        def show(text):
            if "step 1" in text:
                print("READY", flush=True)
        rehearse("count.py", "state", 5, "hang", nodes=2, ranks=1, show=show, timeout=600)
    """
    with driver(code) as notebook:
        server = psutil.Process(notebook.process.pid).children()[0]
        agents = server.children()
        assert len(agents) == 2 and all(len(agent.children()) == 1 for agent in agents)
        target = {"notebook": notebook.process, "agent": agents[1]}[victim]
        target.kill()
        if victim == "agent":  # its own ranks go at once; the other node's job ends with an error
            assert wait_until(lambda: len(notebook.others()) <= 3, 5.0)
            notebook.process.kill()
        assert wait_until(lambda: not notebook.others(), 10.0), notebook.others()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"faults": {"rank one dies": 3}}, "is no fault: write 'rank 1 dies'"),
        ({"faults": {"rank 1 joins": 3}}, "is no fault"),
        ({"faults": {"node 1 dies": 0}}, "needs a step from 1 on"),
        ({"faults": {"node 5 dies": 3}}, "the nodes are 0 to 1"),
        ({"nodes": "two"}, "write a number such as 2"),
        ({"nodes": "3:2"}, "write a number such as 2"),
        ({"ranks": 0}, "would run nothing"),
    ],
)
def test_questions_that_make_no_sense(script: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rehearse(script, **asked)


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="there is no script 'nowhere.py'"):
        rehearse("nowhere.py")


def test_faults_come_in_the_order_of_their_steps() -> None:
    asked = {"node 1 joins": 9, "rank 0 dies": 2}
    assert story.faults(asked, 2) == [Fault("rank", 0, "dies", 2), Fault("node", 1, "joins", 9)]


def rounds() -> list[Round]:
    places = {0: Place(0, 0), 1: Place(1, 0), 2: Place(2, 0)}
    moved = {0: Place(0, 0), 1: Place(2, 0)}
    first = Round(3, places, 0, [1, 2, 3, 4, 5], [0.1] * 5, "Node 1 was lost after step 5.")
    return [first, Round(2, moved, 3, [4, 5, 6], [0.2] * 3)]


def test_the_story_counts_and_renumbers() -> None:
    assert story.lost_steps(rounds()) == [2]
    lines = story.story(rounds()).splitlines()
    assert lines == [
        "Round 1: 3 ranks on nodes 0, 1 and 2; from the beginning, steps 1 to 5.",
        "  Node 1 was lost after step 5. Lost: steps 4 and 5, done since the checkpoint of step 3.",
        "  Rank 2 (node 2) is rank 1 now.",
        "Round 2: 2 ranks on nodes 0 and 2; from the checkpoint of step 3, steps 4 to 6.",
        "8 steps were computed, 2 of them again.",
    ]


def test_a_checkpoint_at_the_fault_loses_nothing() -> None:
    first, second = rounds()
    second.start, second.steps = 5, [6]
    assert story.lost_steps([first, second]) == [0]
    assert "Nothing was lost." in story.story([first, second])


def test_conf_is_given_once() -> None:
    words = nodes._with_conf(["--a", "--rdzv-conf=is_host=false", "--b"])
    assert words == ["--a", "--b", f"--rdzv-conf=is_host=false,{nodes.QUICK}"]


def test_a_rank_whose_agent_is_gone_already_ends() -> None:
    code = "from labutils.launch.helper import die_with_parent; die_with_parent(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
