"""Network namespaces for nodes: names, addresses, shaped links, and nothing left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_helpers import driver, interrupt_after, wait_until

from labutils.launch import RankFailure, board, launch, network, switch

needs_namespaces = pytest.mark.skipif(bool(network.missing()), reason=network.missing())


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of this process and its ranks go here, where nobody else's are."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("LABUTILS_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(board, "folder", lambda: "")
    return folder


def left_in(folder: Path) -> list[str]:
    """Files there, besides the folder for compiled code that torch makes when it is imported."""
    return [f.name for f in folder.iterdir() if not f.name.startswith("torchinductor_")]


def net_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def namespaces(pids: Iterable[int]) -> set[str]:
    """Network namespaces of processes, besides this machine's own."""
    return {net_namespace(pid) for pid in pids} - {net_namespace(os.getpid()), ""}


def descendants() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def links() -> set[str]:
    """Links of this machine that bear the names of a rehearsal's."""
    names = {name for _, name in socket.if_nameindex()}
    return {name for name in names if name.startswith(("port", "bridge"))}


def nothing_left(before: set[str]) -> bool:
    """Whether no process of ours is in a namespace of its own, and no link is new."""
    return wait_until(lambda: not namespaces(descendants()) and links() <= before, 5.0)


@pytest.mark.parametrize(
    ("text", "number"), [("1gbit", 1e9), ("200 Mbit", 2e8), ("640kbit", 640e3), (None, 0.0)]
)
def test_bandwidths(text: str | None, number: float) -> None:
    assert network.bits_per_second(text) == number


def test_delays() -> None:
    assert network.seconds("2ms") == pytest.approx(2e-3)
    assert network.seconds("150us") == pytest.approx(150e-6)


@pytest.mark.parametrize("wrong", ["fast", "1", "-1mbit", "0mbit", "1 GB", ""])
def test_what_is_no_bandwidth(wrong: str) -> None:
    with pytest.raises(ValueError, match="is no bandwidth: write a number and one of"):
        network.bits_per_second(wrong)


def test_arguments_that_make_no_sense() -> None:
    for asked, message in (
        ({"nodes": 1, "network": "namespaces"}, "choose nodes=2"),
        ({"nodes": 2, "network": "wifi"}, "network='wifi' is not known"),
        ({"nodes": 2, "bandwidth": "1gbit"}, "pass network='namespaces' as well"),
        ({"nodes": 2, "network": "namespaces", "delay": "soon"}, "is no delay"),
        ({"nodes": 2, "network": "namespaces", "delay": "30s"}, "more than 500ms each way"),
        ({"nodes": 2, "network": "namespaces", "bandwidth": "1bit"}, "less than 100kbit"),
    ):
        with pytest.raises(ValueError, match=message):
            launch(int, ranks=1, **asked)  # type: ignore[arg-type]


def test_without_root_it_says_so_and_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    network.missing.cache_clear()
    try:
        run = launch(socket.gethostname, nodes=2, ranks=1, network="namespaces")
    finally:
        network.missing.cache_clear()
    assert run.results == [socket.gethostname()] * 2
    said = capsys.readouterr().out
    assert "Network namespaces need root. The nodes share the loopback device" in said


def where() -> tuple[Any, ...]:
    """In a rank: host name, its address, interfaces, the meeting place, a sum over all."""
    x = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    name = socket.gethostname()
    links = sorted(link for _, link in socket.if_nameindex())
    return (
        name, socket.gethostbyname(name), links, os.environ["MASTER_ADDR"],
        os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], x.item(),
    )  # fmt: skip


@needs_namespaces
def test_each_node_has_a_name_an_address_and_an_interface_of_its_own(own_folder: Path) -> None:
    before = links()
    run = launch(where, nodes=2, ranks=2, network="namespaces")
    for rank, found in enumerate(run.results):
        node = rank // 2
        assert found[:2] == (f"node{node}", f"10.77.0.{node + 1}")
        assert found[2] == ["eth0", "lo"]
        assert found[3] == "node0"
        assert found[4:7] == (str(rank), str(rank % 2), str(node))
        assert found[7] == 10.0
    assert nothing_left(before)
    assert left_in(own_folder) == []


def timed(numbers: int) -> list[float]:
    """In a rank: seconds of a large all-reduce and of a very small one, the best of some."""
    times = []
    for size in (numbers, 1):
        x, best = torch.ones(size), 1e9
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(x)
            best = min(best, time.perf_counter() - start)
        times.append(best)
    return times


@needs_namespaces
def test_bandwidth_and_delay_are_what_was_asked_for() -> None:
    """Never faster than the link allows, by physics; much slower only on a machine that is busy."""
    numbers, rate = 1_000_000, 200e6
    run = launch(timed, nodes=2, ranks=1, args=(numbers,), network="namespaces",
                 bandwidth="200mbit", delay="20ms", checked=False, record=False)  # fmt: skip
    large, small = run.results[0]
    assert large > 0.95 * 32 * numbers / rate + 0.02
    assert small > 0.02  # a message has to come from the other node at least once


def change_the_limit() -> tuple[float, float, str]:
    times = []
    for bandwidth in ("50mbit", "1gbit"):
        network.limit(bandwidth)
        times.append(timed(250_000)[0])
    shape = subprocess.run(
        ["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True
    ).stdout
    return (*times, shape)


@needs_namespaces
def test_a_rank_can_change_the_limit() -> None:
    run = launch(change_the_limit, nodes=2, ranks=1, network="namespaces")
    slow, fast, shape = run.results[1]
    assert slow > 0.9 * 8e6 / 50e6
    assert fast < slow / 3
    assert "tbf" in shape and "rate 1Gbit" in shape


def test_limit_is_for_nodes_of_a_rehearsal() -> None:
    with pytest.raises(RuntimeError, match="for ranks that run with network='namespaces'"):
        network.limit("1gbit")


def meet_on(interface: str) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        dist.init_process_group("gloo", timeout=timedelta(milliseconds=500))
        return "met"
    except Exception as error:
        return str(error)


@needs_namespaces
def test_the_wrong_interface_is_really_wrong() -> None:
    def both() -> tuple[str, str]:
        return meet_on("eth0"), meet_on("lo")

    run = launch(both, nodes=2, ranks=1, network="namespaces", timeout=60)
    assert [right for right, _ in run.results] == ["met", "met"]
    assert all("onnect" in wrong for _, wrong in run.results)
    assert any("refused" in wrong for _, wrong in run.results)


@needs_namespaces
def test_two_networks_at_the_same_time_do_not_meet() -> None:
    runs = [launch(where, nodes=2, ranks=1, network="namespaces", block=False) for _ in range(2)]
    for run in runs:
        run.wait(60)
        assert [found[7] for found in run.results] == [3.0, 3.0]


@needs_namespaces
def test_nothing_is_left_after_a_failure(own_folder: Path) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("bad data")
        dist.barrier()

    before = links()
    with pytest.raises(RankFailure, match="Rank 1 failed: ValueError: bad data"):
        launch(fail, nodes=2, ranks=1, network="namespaces", checked=False)
    assert nothing_left(before)
    assert left_in(own_folder) == []


@needs_namespaces
def test_nothing_is_left_after_an_interrupt(own_folder: Path) -> None:
    before = links()
    with pytest.raises(KeyboardInterrupt), interrupt_after(4.0):
        launch(time.sleep, nodes=2, ranks=1, args=(100,), network="namespaces", timeout=None)
    assert nothing_left(before)
    assert left_in(own_folder) == []


HANGS = """
    import time
    from labutils.launch import board, launch

    board.folder = lambda: ""  # the usual place for temporary files

    def hang():
        print("READY", flush=True)
        time.sleep(100)

    launch(hang, nodes=2, ranks=1, network="namespaces", bandwidth="1gbit", delay="1ms",
           timeout=None)
"""


@needs_namespaces
@pytest.mark.parametrize("victim", ["notebook", "server", "agent", "switch"])
def test_nothing_is_left_after_a_kill(victim: str, tmp_path: Path) -> None:
    """Processes, namespaces, links and files are gone, whoever was killed."""
    before, folder = links(), tmp_path / "temporary"
    folder.mkdir()
    with driver(HANGS, TMPDIR=str(folder), LABUTILS_RUNS=str(tmp_path / "runs")) as notebook:
        others = [psutil.Process(pid) for pid in notebook.others()]
        server = next(p for p in others if p.ppid() == notebook.process.pid)
        children = server.children()
        agents = [p for p in children if p.children()]
        switch = next(p for p in children if p not in agents)
        assert len(agents) == 2 and len(others) == 6  # server, switch, agents, a rank each
        made = namespaces(notebook.others())
        assert len(made) == 3  # two nodes and the switch
        victims = {"notebook": notebook.process, "server": server, "agent": agents[1],
                   "switch": switch}  # fmt: skip
        victims[victim].send_signal(signal.SIGKILL)
        if victim == "switch":  # the nodes live on, cut off; the notebook still ends them
            os.kill(notebook.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not notebook.others(), 20.0), notebook.others()
        if victim in ("notebook", "switch"):
            assert notebook.process.wait(5) == -signal.SIGKILL
        assert wait_until(lambda: not made & namespaces(psutil.pids()), 5.0)
    assert links() <= before
    assert left_in(folder) == []


def test_the_kernels_own_switches_are_not_needed() -> None:
    """The relay that delays packets keeps their order, and drops what nobody is there for."""
    relay = switch.Relay(0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    due = time.monotonic()
    relay.waiting.extend(
        [(due, theirs, b"first"), (due, theirs, b"second"), (due + 9, theirs, b"x")]
    )
    relay._hand_on()
    assert [ours.recv(16), ours.recv(16)] == [b"first", b"second"]
    assert len(relay.waiting) == 1
    theirs.close()
    relay.waiting.appendleft((due, theirs, b"to nobody"))
    relay._hand_on()
    ours.close()


@pytest.mark.skipif(sys.platform != "linux", reason="there are no namespaces to ask for")
def test_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    network.missing.cache_clear()
    try:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr("shutil.which", lambda name: None if name == "tc" else name)
        assert network.missing() == "Network namespaces need tc (packages iproute2 and util-linux)."
    finally:
        network.missing.cache_clear()


@needs_namespaces
def test_a_network_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.Network, "node", lambda self, i: network.Node(i, "x" * 99, (), 0.0))
    with pytest.raises(RuntimeError, match="could not be built: (.|\n)*OSError"):
        launch(where, nodes=2, ranks=1, network="namespaces")
