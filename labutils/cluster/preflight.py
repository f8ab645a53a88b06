"""``labutils preflight``: every node of a job looks at itself and at the others before training.

Each node runs this once.  Node 0 listens where training will meet; the others come there, tell what
they are, let their clocks be compared, and try to reach each other.  Node 0 shows the table and
names who is to blame; all nodes end with the same exit code.

What travels is JSON, a line each.  A stranger who connects, or a node of another job, is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Any

from labutils.cluster import address
from labutils.cluster.facts import Facts, collect
from labutils.cluster.hostlist import expand
from labutils.cluster.judge import judge, table
from labutils.doctor import PROBLEM, Finding, report

CLOCK_EXCHANGES = 8
REACH_S = 5.0
"""How long a node tries to reach another one."""
WELCOME_S = 5.0
"""How long a node that has begun to speak may take to tell what it is."""
_MORE_S = 60.0  # for what follows when all have come, or nobody comes any more


class Failed(ValueError):
    """The preflight cannot go on here; the message says why."""


class Line:
    """A connection that carries JSON values, one a line."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self.deadline = sock, deadline
        self._file = sock.makefile("rwb")

    def send(self, value: Any) -> None:
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()

    def receive(self) -> Any:
        """The next value; OSError if the other side is gone or late, ValueError if it is odd."""
        self._sock.settimeout(max(0.1, self.deadline - time.monotonic()))
        text = self._file.readline(1 << 20)
        if not text.endswith(b"\n"):
            raise ConnectionError("the other side is gone")
        return json.loads(text)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._sock.close()


def lead(listener: socket.socket, mine: Facts, hosts: list[str], token: str, deadline: float,
         gpus: int, ranks: int = 1) -> list[Finding]:  # fmt: skip
    """Node 0: gather the others, compare, tell them the verdict."""
    mine.port = listener.getsockname()[1]
    lines: list[Line] = []
    told = [mine]
    with contextlib.closing(_speakers(listener, deadline)) as speakers:
        while len(told) < len(hosts) and (sock := next(speakers, None)):
            line = Line(sock, time.monotonic() + WELCOME_S)
            try:
                told.append(_welcome(line, token))
                lines.append(line)
            except (OSError, ValueError, TypeError, KeyError) as error:
                address.say(f"someone who is no node of this job was sent away ({error})")
                line.close()
    with _open_door(listener):
        _reach_each_other(mine, told, lines)
    findings = judge(told, hosts, gpus, ranks)
    print(table(told))
    for line in lines:
        with contextlib.suppress(OSError):
            line.send([asdict(finding) for finding in findings])
        line.close()
    return findings


def follow(mine: Facts, meeting: tuple[str, int], token: str, deadline: float) -> list[Finding]:
    """Any other node: go to node 0, answer its questions; its verdict."""
    with socket.create_server((mine.address, 0)) as listener, _open_door(listener):
        mine.port = listener.getsockname()[1]
        line = Line(_connect(meeting, deadline), deadline + _MORE_S)
        try:
            line.send({"token": token, "facts": mine.to_json()})
            while isinstance(answer := line.receive(), dict):
                line.send(time.time() if "clock" in answer else _try_all(mine, answer["peers"]))
        except (OSError, ValueError) as error:
            raise Failed(
                f"{mine.host} lost node 0 at {meeting[0]}:{meeting[1]} during the preflight "
                f"({error or 'it did not answer'}): see what node 0 says."
            ) from None
        finally:
            line.close()
    return [Finding(**finding) for finding in answer]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils preflight``."""
    parser.add_argument("--hosts", required=True, help="the nodes: a,b or node[01-04]")
    parser.add_argument("--meet", required=True, metavar="ADDRESS:PORT", help="where node 0 is")
    parser.add_argument(
        "--node-rank", type=int, default=os.environ.get("SLURM_NODEID"),
        help="number of this node (default $SLURM_NODEID)",
    )  # fmt: skip
    parser.add_argument("--gpus-per-node", type=int, default=0, help="GPUs each node must see")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks that want a core each")
    parser.add_argument("--interface", default="", help="network interface to use")
    parser.add_argument("--script", default="", help="a file that must be the same on all nodes")
    parser.add_argument("--token", default="labutils", help="the job's id, to tell jobs apart")
    parser.add_argument("--timeout", type=float, default=120, help="seconds to wait for all nodes")


def main(arguments: argparse.Namespace) -> int:
    """0 if training can start; the findings are shown by node 0, others show their own."""
    if arguments.node_rank is None:
        raise ValueError("say which node this is: --node-rank (Slurm sets SLURM_NODEID).")
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        raise Failed(
            f"{socket.gethostname()} runs more than one task: start one task a node "
            "(--ntasks-per-node=1), since torchrun starts the ranks itself."
        )
    hosts, meeting = expand(arguments.hosts), _endpoint(arguments.meet)
    if not 0 <= arguments.node_rank < len(hosts):
        raise ValueError(
            f"--node-rank is 0 to {len(hosts) - 1} for {len(hosts)} nodes, not "
            f"{arguments.node_rank}."
        )
    if not 0 < arguments.timeout < math.inf:
        raise ValueError(f"--timeout is a number of seconds, not {arguments.timeout:g}.")
    deadline = time.monotonic() + arguments.timeout
    findings = _take_part(arguments, hosts, meeting, deadline)
    if arguments.node_rank == 0:
        print(report(findings) if findings else f"{len(hosts)} nodes are ready.")
    return int(any(finding.level == PROBLEM for finding in findings))


def _take_part(
    arguments: argparse.Namespace, hosts: list[str], meeting: tuple[str, int], deadline: float
) -> list[Finding]:
    rank, interface, script = arguments.node_rank, arguments.interface, arguments.script
    if rank:
        mine = collect(rank, hosts, meeting[0], interface, script)
        if mine.trouble:  # node 0 may never hear of it
            address.say(f"{mine.host}: {mine.trouble}")
        return follow(mine, meeting, arguments.token, deadline)
    with _listen(meeting, len(hosts)) as listener:  # first of all: others may be here already
        mine = collect(rank, hosts, meeting[0], interface, script)
        gpus, ranks = arguments.gpus_per_node, arguments.ranks_per_node
        return lead(listener, mine, hosts, arguments.token, deadline, gpus, ranks)


def _listen(meeting: tuple[str, int], nodes: int) -> socket.socket:
    """Where all other nodes may connect before the first of them is welcomed."""
    name = socket.gethostname()
    if meeting[0] not in (own := address.own_addresses()):
        raise Failed(
            f"{name} is to be node 0 at {meeting[0]}, but its addresses are "
            f"{', '.join(own) or 'loopback only'}: is another node to be node 0?"
        )
    try:
        return socket.create_server(meeting, backlog=nodes + 16)
    except OSError as error:
        raise Failed(
            f"{name} cannot listen on {meeting[0]}:{meeting[1]} ({error.strerror}): does another "
            "program use the port, or does more than one task run on this node?"
        ) from None


def _speakers(listener: socket.socket, deadline: float) -> Generator[socket.socket]:
    """Connections to ``listener`` on which something is said, in that order, until the deadline.

    Those that stay silent keep nobody waiting, and are closed at the end.
    """
    silent: set[socket.socket] = set()
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        try:
            while keys := ready.select(max(0.1, deadline - time.monotonic())):
                for sock in (key.fileobj for key, _ in keys):
                    if sock is listener:
                        silent.add(new := listener.accept()[0])
                        ready.register(new, selectors.EVENT_READ)
                    elif isinstance(sock, socket.socket):
                        ready.unregister(sock)
                        silent.remove(sock)
                        yield sock
        finally:
            for sock in silent:
                sock.close()


@contextlib.contextmanager
def _open_door(listener: socket.socket) -> Iterator[None]:
    """Meanwhile take connections and close them: those who only try the way fill no queue.

    The kernel keeps a few connections waiting (128 before Linux 5.4), and ignores all others.
    """
    done = threading.Event()
    listener.settimeout(0.1)

    def take() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                listener.accept()[0].close()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _welcome(line: Line, token: str) -> Facts:
    """Take a node's facts, and set its clock against ours."""
    said = line.receive()
    if said["token"] != token:
        raise ValueError("it belongs to another job")
    facts = Facts(**said["facts"])
    exchanges = []
    for _ in range(CLOCK_EXCHANGES):
        sent = time.time()
        line.send({"clock": sent})
        theirs, received = line.receive(), time.time()
        exchanges.append((received - sent, theirs - (sent + received) / 2))
    delay, facts.clock_ahead = min(exchanges)
    facts.clock_error = delay / 2
    return facts


def _reach_each_other(mine: Facts, told: list[Facts], lines: list[Line]) -> None:
    """Every node tries every other one: training opens ports of its own between all of them."""
    peers = [[node.host, node.address, node.port] for node in told if not node.trouble]
    for line in lines:
        line.deadline = time.monotonic() + _MORE_S
        with contextlib.suppress(OSError):
            line.send({"peers": peers})
    mine.unreachable = _try_all(mine, peers)
    for node, line in zip(told[1:], lines):
        try:
            node.unreachable = dict(line.receive())
        except (OSError, ValueError):
            mine.unreachable[node.host] = "it went away during the preflight"


def _try_all(mine: Facts, peers: list[Any]) -> dict[str, str]:
    unreachable = {}
    for host, where, port in peers:
        if (where, port) == (mine.address, mine.port):
            continue
        try:
            socket.create_connection((where, port), timeout=REACH_S).close()
        except OSError as error:
            unreachable[host] = f"{where}:{port} {error.strerror or 'does not answer'}"
    return unreachable


def _connect(meeting: tuple[str, int], deadline: float) -> socket.socket:
    """To node 0, which may not be there yet."""
    while True:
        left = max(0.5, deadline - time.monotonic())
        try:
            return socket.create_connection(meeting, timeout=min(left, REACH_S))
        except OSError as error:
            why = error.strerror or "it does not answer"
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    raise Failed(
        f"{socket.gethostname()} cannot reach node 0 at {meeting[0]}:{meeting[1]} ({why}): does "
        "node 0 say something, is a firewall between, or is another --interface meant?"
    )


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--meet takes ADDRESS:PORT, not {text!r}.")
    return host, int(port)
