"""The preflight between processes' threads on loopback, and its verdict on made-up nodes."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from labutils.cli import main
from labutils.cluster import address, preflight
from labutils.cluster.facts import Facts
from labutils.cluster.judge import judge, table
from labutils.doctor import PROBLEM, WARNING

VERSIONS = {"Python": "3.12.1", "PyTorch": "2.13.0+cu130", "CUDA": "13.0", "NCCL": "2.28.3"}
HOSTS = ["a", "b", "c"]


def nodes() -> list[Facts]:
    return [
        Facts(rank, host, "", f"10.0.0.{rank}", "ib0", dict(VERSIONS), ["A100"] * 4, 64 << 30)
        for rank, host in enumerate(HOSTS)
    ]


def test_sound_nodes_have_nothing_against_them() -> None:
    assert judge(nodes(), HOSTS, gpus=4) == []
    shown = table(nodes()).splitlines()
    assert len(shown) == 4
    assert "4 x A100" in shown[1]


@pytest.mark.parametrize(
    ("changes", "level", "sentence"),
    [
        ({"gpus": ["A100"] * 3}, PROBLEM, "sees 3 of 4 GPUs"),
        ({"cores": 1}, WARNING, "has 1 core for 4 ranks"),
        ({"shared_memory": 64 << 20}, PROBLEM, "has 64 MiB of /dev/shm"),
        ({"shared_memory": 512 << 20}, WARNING, "has 512 MiB of /dev/shm"),
        ({"clock_ahead": -40.0, "clock_error": 0.01}, PROBLEM, "has a clock -40.0 s from"),
        ({"clock_ahead": 2.0, "clock_error": 0.01}, WARNING, "has a clock +2.0 s from"),
        ({"unreachable": {"c": "10.0.0.2:5 timed out"}}, PROBLEM, "cannot reach c: 10.0.0.2:5"),
        ({"unresolved": ["c"]}, WARNING, "cannot resolve c"),
        ({"versions": {**VERSIONS, "NCCL": "2.27.5"}}, PROBLEM, "has NCCL 2.27.5, where 2.28.3"),
        ({"trouble": "no torch"}, PROBLEM, "no torch"),
    ],
)
def test_each_fault_is_laid_at_the_right_door(
    changes: dict[str, Any], level: str, sentence: str
) -> None:
    told = nodes()
    told[1] = replace(told[1], **changes)
    (finding,) = judge(told, HOSTS, gpus=4, ranks=4)
    assert (finding.what, finding.level) == ("b", level)
    assert sentence in finding.text
    assert finding.way_out


def test_a_clock_is_not_blamed_for_what_cannot_be_known() -> None:
    told = nodes()
    told[1] = replace(told[1], clock_ahead=2.0, clock_error=1.8)
    assert judge(told, HOSTS, gpus=4) == []


def test_who_came_and_who_did_not() -> None:
    told = nodes()
    (finding,) = judge(told[:2], HOSTS, gpus=4)
    assert (finding.what, finding.text) == ("c", "did not come to the meeting")
    told[2].rank = 1
    (finding,) = judge(told, HOSTS, gpus=4)
    assert (finding.what, finding.text) == ("b and c", "both call themselves node 1")
    told = [*nodes(), replace(nodes()[2], rank=3)]
    (finding,) = judge(told, HOSTS, gpus=4)
    assert (finding.what, finding.text) == ("c", "came 2 times")


def meet(hosts: list[str], others: list[Facts], token: str = "job", wait: float = 3.0) -> Any:
    """Node 0 in this thread, the others in threads of their own, on loopback."""
    verdicts: dict[str, Any] = {}
    deadline = time.monotonic() + wait

    def come(facts: Facts) -> None:
        try:
            verdicts[facts.host] = preflight.follow(facts, where, token, deadline)
        except ValueError as error:
            verdicts[facts.host] = str(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[:2]
        threads = [threading.Thread(target=come, args=(facts,)) for facts in others]
        for thread in threads:
            thread.start()
        mine = Facts(0, hosts[0], "", "127.0.0.1", "lo", shared_memory=1 << 30)
        verdicts[hosts[0]] = preflight.lead(listener, mine, hosts, "job", deadline, gpus=0)
    for thread in threads:
        thread.join()
    return verdicts


def node(rank: int, host: str) -> Facts:
    return Facts(rank, host, "", "127.0.0.1", "lo", shared_memory=1 << 30)


def test_all_hear_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = meet(HOSTS, [node(1, "b"), node(2, "c")])
    assert verdicts == {"a": [], "b": [], "c": []}
    small = replace(node(2, "c"), shared_memory=1 << 20)
    verdicts = meet(HOSTS, [node(1, "b"), small])
    assert verdicts["a"] == verdicts["b"] == verdicts["c"]
    assert [finding.what for finding in verdicts["a"]] == ["c"]


def test_a_clock_that_runs_ahead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    follower, real = threading.local(), time.time

    def clock() -> float:
        return real() + getattr(follower, "ahead", 0.0)

    def follow(*arguments: Any) -> Any:
        follower.ahead = 100.0
        return real_follow(*arguments)

    real_follow = preflight.follow
    monkeypatch.setattr("labutils.cluster.preflight.time.time", clock)
    monkeypatch.setattr(preflight, "follow", follow)
    (finding,) = meet(["a", "b"], [node(1, "b")])["a"]
    assert finding.text == "has a clock +100.0 s from node 0's"


def test_another_job_is_sent_away(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = meet(["a", "b"], [node(1, "b")], token="another", wait=0.5)
    assert "lost node 0" in verdicts["b"]
    assert [finding.text for finding in verdicts["a"]] == ["did not come to the meeting"]
    assert "belongs to another job" in capsys.readouterr().err


def test_a_stranger_does_no_harm() -> None:
    deadline = time.monotonic() + 1
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        findings = preflight.lead(listener, node(0, "a"), ["a", "b"], "job", deadline, gpus=0)
    assert [finding.what for finding in findings] == ["b"]


@pytest.mark.parametrize("said", [b"", b'{"token": '])
def test_a_stranger_who_stops_speaking_keeps_no_node_out(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(preflight, "WELCOME_S", 0.3)
    deadline = time.monotonic() + 20
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[:2]
        with socket.create_connection(where) as stranger:
            stranger.sendall(said)
            arguments = (node(1, "b"), where, "job", deadline)
            thread = threading.Thread(target=preflight.follow, args=arguments, daemon=True)
            thread.start()
            findings = preflight.lead(listener, node(0, "a"), ["a", "b"], "job", deadline, gpus=0)
            thread.join()
    assert findings == []


CROWD = 150
"""More connections than a listener of Python keeps waiting by itself (128)."""


def crowd(where: tuple[str, int]) -> None:
    """As many nodes as that try to reach this one, at the same time."""
    for _ in range(CROWD):
        socket.create_connection(where, timeout=5).close()


def test_a_node_is_reached_by_all_nodes_of_a_large_job() -> None:
    deadline = time.monotonic() + 30
    with socket.create_server(("127.0.0.1", 0)) as node_0:
        arguments = (node(1, "b"), node_0.getsockname()[:2], "job", deadline)
        thread = threading.Thread(target=preflight.follow, args=arguments, daemon=True)
        thread.start()
        line = preflight.Line(node_0.accept()[0], deadline)
        crowd(("127.0.0.1", line.receive()["facts"]["port"]))
        line.send([])  # the verdict
        thread.join()
        line.close()


def test_node_0_is_reached_by_all_nodes_of_a_large_job() -> None:
    deadline = time.monotonic() + 30

    def come() -> None:
        line = preflight.Line(socket.create_connection(where), deadline)
        facts = replace(node(1, "b"), port=where[1])  # which node 0 need not try: its own
        line.send({"token": "job", "facts": facts.to_json()})
        while "clock" in line.receive():
            line.send(time.time())
        try:
            crowd(where)
            line.send({})
        finally:
            line.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[:2]
        thread = threading.Thread(target=come)
        thread.start()
        assert preflight.lead(listener, node(0, "a"), ["a", "b"], "job", deadline, gpus=0) == []
        thread.join()


def test_a_large_job_may_wait_for_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "own_addresses", lambda: {"127.0.0.1": "lo"})
    with preflight._listen(("127.0.0.1", 0), CROWD) as listener:
        crowd(listener.getsockname())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--hosts", "a,b", "--meet", "10.0.0.1:1"], "say which node this is"),
        (["--hosts", "a,b", "--meet", "10.0.0.1:1", "--node-rank", "5"], "--node-rank is 0 to 1"),
        (["--hosts", "a,b", "--meet", "10.0.0.1:1", "--node-rank", "-1"], "--node-rank is 0 to 1"),
        (["--hosts", "n[1-99999999999]", "--meet", "10.0.0.1:1", "--node-rank", "0"],
         "names more than 100,000 nodes"),
        (["--hosts", "a,b", "--meet", "10.0.0.1:1", "--node-rank", "0", "--timeout", "inf"],
         "--timeout is a number of seconds"),
        (["--hosts", "a,b", "--meet", "10.0.0.1", "--node-rank", "0"], "--meet takes ADDRESS:PORT"),
        (["--hosts", "a,b", "--meet", "192.0.2.1:1", "--node-rank", "0"], "is another node to be"),
    ],
)  # fmt: skip
def test_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    for name in ("SLURM_NODEID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["preflight", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_that_is_taken_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(address, "own_addresses", lambda: {"127.0.0.1": "lo"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["--hosts", "a,b", "--meet", where, "--node-rank", "0"]
        assert main(["preflight", *words]) == 2
    assert "does more than one task run on this node?" in capsys.readouterr().err
