"""The agents of a rehearsed job, and the loop that follows them and lets faults come."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from labutils.guard import alive
from labutils.launch import output
from labutils.launch.agent import Hello
from labutils.launch.forked import OWN_STORE, Agent
from labutils.launch.job import EXIT
from labutils.launch.network import Network
from labutils.launch.report import explain_exit
from labutils.launch.story import (
    RESUMED,
    STEP,
    Fault,
    Place,
    Rehearsal,
    RehearsalFailed,
    Round,
    listed,
)  # fmt: skip
from labutils.launch.world import World

_TICK_S = 0.05


class _Rank:
    """A rank that runs: what it is, and the notebook's end of its output."""

    def __init__(self, hello: Hello, place: Place, sock: socket.socket) -> None:
        self.hello, self.place, self.sock = hello, place, sock
        self.rest = b""


class Job:
    """The agents of a rehearsal; :meth:`run` it to its end."""

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
        self.held: _Rank | None = None
        """Rank 0, after another rank was killed: what that one had sent might do for one more step.
        Usually torchrun ends it, to start all ranks again."""
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
            self.result.missed = list(self.faults)
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
        channels = {agent.channel: node for node, agent in self.agents.items() if not agent.ended()}
        sockets = [*channels, *self.ranks]
        for sock in select.select(sockets, [], [], _TICK_S)[0]:
            self.moved = time.monotonic()
            if sock in self.ranks:
                self._read(self.ranks[sock])
            elif not self._greet(channels[sock]):
                time.sleep(_TICK_S)  # it is ending
        if self.held is not None and any(agent.ended() for agent in self.agents.values()):
            self._let_go_on(self.held)  # there is no restart: it is to notice
            self.held = None
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
            self._let_go_on(rank)

    def _let_go_on(self, rank: _Rank) -> None:
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
            what = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
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
        self.held = next((r for r in self.ranks.values() if r.hello.rank == 0), None)
        return False

    def _kill(self, place: Place) -> None:
        (victim,) = [r for r in self.ranks.values() if r.place == place and alive(r.hello.pid)]
        os.kill(victim.hello.pid, signal.SIGKILL)
        while alive(victim.hello.pid):
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
        nodes = f"torchrun ended with an error on node {listed(sorted(failed))}"
        if 0 in self.dead and self.network is not None:
            return (
                f"{end}{nodes}: node 0 hosted the rendezvous, and without it no rank can be "
                "started again (real jobs keep it on a machine that does not train, or are queued "
                "again as a whole)."
            )
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
