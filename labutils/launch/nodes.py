"""``lab.rehearse``: a script under one torchrun per node, side by side, with the faults of clusters.

Each node's torchrun gets the line that a person would type in a terminal of that node, and the
rendezvous, restarts and renumbering are torchrun's own.  A fault comes after a step of rank 0, and
rank 0 waits with its next step until the fault is there, so that what is lost can be counted.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from labutils.launch import output, story
from labutils.launch.agent import Hello
from labutils.launch.forked import OWN_STORE, Agent, rendezvous
from labutils.launch.job import EXIT, exists
from labutils.launch.network import Network
from labutils.launch.pool import loopback_store
from labutils.launch.processes import forking_is_safe
from labutils.launch.report import explain_exit
from labutils.launch.story import RESUMED, STEP, Fault, Place, Round
from labutils.launch.world import World

if TYPE_CHECKING:
    from labutils.figures import TraceFigure

QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
"""``--rdzv-conf`` of a rehearsal: a lost node is given up after three seconds instead of fifteen, and
a node that may still come is waited for during two seconds instead of thirty."""

_TICK_S = 0.05


class RehearsalFailed(RuntimeError):
    """The job did not come to its end; ``rehearsal`` has what happened until then."""

    def __init__(self, message: str, rehearsal: Rehearsal) -> None:
        super().__init__(message)
        self.rehearsal = rehearsal

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m{type(self).__name__}: {self}\x1b[0m"]


class Rehearsal:
    """What :func:`rehearse` returns."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        """The command of each node."""
        self.rounds: list[Round] = []
        self.printed: list[tuple[Place, int, str]] = []
        """(place, rank, line) of everything that ranks have printed."""
        self.moments: list[tuple[float, str]] = []
        """(seconds since the start, name) of each fault."""

    @property
    def lost(self) -> list[int]:
        """For each restart, the number of steps that had to be done again."""
        return story.lost_steps(self.rounds)

    def figure(self) -> TraceFigure:
        """The steps over time, with the faults."""
        return story.figure(self.rounds, self.moments)

    def __repr__(self) -> str:
        return story.story(self.rounds)


def rehearse(
    script: str,
    *arguments: object,
    nodes: int | str = 2,
    ranks: int = 2,
    max_restarts: int = 0,
    faults: Mapping[str, int] | None = None,
    network: str | None = None,
    bandwidth: str | None = None,
    delay: str | None = None,
    timeout: float = 60.0,
    show: Callable[[str], None] | None = output.to_cell,
) -> Rehearsal:
    """Run a script as a job of several nodes, one torchrun each, and let things go wrong.

    Args:
        script, arguments: as on torchrun's command line.
        nodes: how many, or ``"least:most"`` as ``--nnodes`` has it.
        ranks: ranks per node.
        max_restarts: how often torchrun starts the ranks again after a failure.
        faults: what is to happen after which step, e.g. ``{"rank 1 dies": 8, "node 1 joins": 12}``.
            Rank 0 must print a line that begins with ``step N`` after each step.  A node that
            joins is not there from the start.
        network, bandwidth, delay: as for ``lab.launch``.
        timeout: seconds without a line from any rank, after which the job is ended.
        show: where the commands and the lines go; None: nowhere.

    Raises:
        RehearsalFailed: a node's torchrun ended with an error; the message names node and rank.
        ValueError: the numbers make no sense.  FileNotFoundError: there is no such script.
    """
    least, most = _nodes(nodes)
    world = World(ranks, most)
    wanted = story.faults(faults or {}, most)
    if not os.path.isfile(script):
        raise FileNotFoundError(f"there is no script {script!r} in {os.getcwd()}.")
    if not forking_is_safe():
        raise RuntimeError("lab.rehearse needs Linux, where ranks can be forked.")
    from labutils.launch import network_shape

    shape = network_shape(most, network, bandwidth, delay)
    net = Network(most, *shape) if shape is not None else None
    try:
        store = loopback_store()
        words = rendezvous(str(nodes), ranks, net, store.port)
        if least != most:
            words = _with_conf(words)
        words += [f"--max-restarts={max_restarts}"] if max_restarts else []
        words += [script, *map(str, arguments)]
        job = _Job(words, world, net, wanted, timeout, show or (lambda _: None))
        return job.run()
    finally:
        if net is not None:
            net.close()


def _nodes(nodes: int | str) -> tuple[int, int]:
    least, _, most = str(nodes).partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"nodes={nodes!r}: write a number such as 2, or least:most such as '1:2'.")
    return found


def _with_conf(words: list[str]) -> list[str]:
    """The options with :data:`QUICK` among ``--rdzv-conf``, which may be given only once."""
    conf = [word for word in words if word.startswith("--rdzv-conf=")]
    rest = [word for word in words if word not in conf]
    return [*rest, ",".join([*conf, QUICK]) if conf else f"--rdzv-conf={QUICK}"]


class _Rank:
    """A rank that runs: what it is, and the notebook's end of its output."""

    def __init__(self, hello: Hello, place: Place, sock: socket.socket) -> None:
        self.hello, self.place, self.sock = hello, place, sock
        self.rest = b""


class _Job:
    """The agents of a rehearsal, and the loop that follows them."""

    def __init__(
        self, words: list[str], world: World, network: Network | None, faults: list[Fault],
        timeout: float, show: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.words, self.world, self.network = words, world, network
        self.faults, self.timeout, self.show = faults, timeout, show
        self.result = Rehearsal([_line(words)] * world.nodes)
        self.agents: dict[int, Agent] = {}
        self.dead: set[int] = set()
        self.ranks: dict[socket.socket, _Rank] = {}
        self.start = self.moved = time.monotonic()

    def run(self) -> Rehearsal:
        first = {fault.number: fault.does for fault in self.faults[::-1] if fault.what == "node"}
        late = {node for node, does in first.items() if does == "joins"}
        try:
            for node in range(self.world.nodes):
                if node not in late:
                    self._start(node)
            while not all(agent.ended() for agent in self.agents.values()):
                self._follow()
            self._follow()
        finally:
            for agent in self.agents.values():
                agent.close()
            for rank in self.ranks.values():
                rank.sock.close()
        self._judge()
        return self.result

    def _start(self, node: int) -> None:
        self.dead.discard(node)
        self.show(f"node {node} $ {self.result.lines[node]}\n")
        threads = self.world.threads
        self.agents[node] = Agent(self.words, "script", threads, self.network, node, OWN_STORE)

    def _follow(self) -> None:
        channels = {
            agent.channel: node for node, agent in self.agents.items() if not agent.ended()
        }
        sockets = [*channels, *self.ranks]
        for sock in select.select(sockets, [], [], _TICK_S)[0]:
            self.moved = time.monotonic()
            if sock in self.ranks:
                self._read(self.ranks[sock])
            elif not self._greet(channels[sock]):
                time.sleep(_TICK_S)  # it is ending
        if time.monotonic() > self.moved + self.timeout:
            waited = f"no line came from any rank for {self.timeout:g} s, so the job was ended"
            raise RehearsalFailed(f"{waited}; the last lines:\n{self._last_lines()}", self.result)

    def _greet(self, node: int) -> bool:
        greeted = self.agents[node].greet()
        if greeted is None:
            return False
        hello, (sock,) = greeted
        place = Place(node, hello.local_rank)
        self.ranks[sock] = _Rank(hello, place, sock)
        rounds = self.result.rounds
        full = not rounds or len(rounds[-1].places) == rounds[-1].world_size
        if full or hello.rank in rounds[-1].places or rounds[-1].world_size != hello.world_size:
            rounds.append(Round(hello.world_size))
        rounds[-1].places[hello.rank] = place
        return True

    def _read(self, rank: _Rank) -> None:
        try:
            data = rank.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            del self.ranks[rank.sock]
            rank.sock.close()
            return
        *lines, rank.rest = (rank.rest + data).split(b"\n")
        for line in lines:
            self._take(rank, line.replace(b"\0", b"").decode("utf-8", "replace"), b"\0" in line)

    def _take(self, rank: _Rank, line: str, waits: bool) -> None:
        number = rank.hello.rank
        self.result.printed.append((rank.place, number, line))
        if waits:  # the rest are errors, most of them because of a fault, and kept for the end
            colour = output.prefix(number, output.coloured())
            self.show(f"[node {rank.place.node}] {colour}{line}\n")
        goes_on = self._note(line) if number == 0 and waits else True
        if waits and goes_on:
            with contextlib.suppress(OSError):
                rank.sock.send(b".")

    def _note(self, line: str) -> bool:
        """Note what rank 0 says, and let faults come; whether rank 0 may go on."""
        this = self.result.rounds[-1]
        if resumed := RESUMED.search(line):
            this.start = int(resumed[1])
        step = STEP.match(line)
        if not step:
            return True
        this.steps.append(int(step[1]))
        this.times.append(time.monotonic() - self.start)
        goes_on = True
        while self.faults and self.faults[0].step <= int(step[1]) and goes_on:
            goes_on = self._happen(self.faults.pop(0), int(step[1]))
        return goes_on

    def _happen(self, fault: Fault, step: int) -> bool:
        this, when = self.result.rounds[-1], f"after step {step}"
        self.result.moments.append((time.monotonic() - self.start, str(fault)))
        if fault.does == "joins":
            this.end = f"Node {fault.number} joined {when}."
            self.show(f"--- node {fault.number} joins {when}\n")
            self._start(fault.number)
            return False  # torchrun starts all ranks again
        if fault.what == "node":
            ranks = [rank for rank, place in this.places.items() if place.node == fault.number]
            what = f"rank{'s' * (len(ranks) > 1)} {_list(ranks)}"
            this.end = f"Node {fault.number} was lost {when}, and {what} with it."
            self.show(f"--- node {fault.number} is lost {when}\n")
            self.dead.add(fault.number)
            self.agents[fault.number].close()
            return True
        if fault.number not in this.places:
            raise ValueError(f"'{fault}': the ranks are 0 to {this.world_size - 1}.")
        place = this.places[fault.number]
        this.end = (
            f"Rank {fault.number} (node {place.node}, local rank {place.local_rank}) was killed "
            f"{when}."
        )
        self.show(f"--- rank {fault.number} is killed {when}\n")
        self._kill(place)
        return fault.number != 0

    def _kill(self, place: Place) -> None:
        (victim,) = [r for r in self.ranks.values() if r.place == place and exists(r.hello.pid)]
        os.kill(victim.hello.pid, signal.SIGKILL)
        while exists(victim.hello.pid):
            time.sleep(0.002)

    def _judge(self) -> None:
        self.result.rounds[:] = [r for r in self.result.rounds if r.steps or r.end or not r.start]
        failed = {
            node: code for node, agent in self.agents.items()
            if node not in self.dead and (code := agent.exit_code()) != 0
        }  # fmt: skip
        if failed or len(self.dead) == len(self.agents):
            raise RehearsalFailed(self._why(failed), self.result)

    def _why(self, failed: dict[int, Any]) -> str:
        named = {int(r): int(c) for n in failed for r, c in EXIT.findall(self.agents[n].log())}
        end = next((f"{this.end} " for this in self.result.rounds[-1:] if this.end), "")
        places = self.result.rounds[-1].places if self.result.rounds else {}
        said = [
            f"rank {rank} (node {places[rank].node}, local rank {places[rank].local_rank}): "
            f"{self._last_words(rank) or explain_exit(code)}"
            for rank, code in sorted(named.items()) if rank in places
        ]  # fmt: skip
        nodes = f"torchrun ended with an error on node {_list(sorted(failed))}"
        log = "" if said else "\n" + "\n".join(self.agents[n].log()[-1500:] for n in failed)
        return f"{end}{nodes}; {'; '.join(said)}{log}"

    def _last_words(self, rank: int) -> str:
        """The exception with which a rank ended, if it printed one."""
        lines = [text for _, number, text in self.result.printed if number == rank and text]
        last = lines[-1] if lines else ""
        return last if "Error" in last.partition(":")[0] else ""

    def _last_lines(self) -> str:
        return "\n".join(f"rank {n}: {text}" for _, n, text in self.result.printed[-5:])


def _line(words: list[str]) -> str:
    """What a person would type."""
    variables = [f"{name}={value}" for name, value in OWN_STORE.items()]
    return " ".join([*variables, "torchrun", *map(shlex.quote, words)])


def _list(numbers: list[int]) -> str:
    *most, last = map(str, numbers or ["?"])
    return f"{', '.join(most)} and {last}" if most else last
