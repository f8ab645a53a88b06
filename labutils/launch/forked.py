"""Jobs whose torchrun agents are forked from the fork server: ready in tenths of a second.

With a network, each agent and its ranks live on a node of their own; see
:mod:`labutils.launch.network`.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import time
from typing import Any

from labutils.launch.agent import Hello
from labutils.launch.helper import LONGEST
from labutils.launch.job import JobProcess, JobRanks
from labutils.launch.network import INTERFACE, Network
from labutils.launch.pool import START_S
from labutils.launch.processes import Helper, adopt
from labutils.launch.wire import Channel
from labutils.launch.world import World

PORT = 29400
"""Where the rendezvous listens on the first node of a network of its own (torchrun's default)."""


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The ranks do not share the store of the agents' rendezvous.  With torch 2.13 a restart needs
this: ranks that start anew would read there the addresses of those that were killed."""


class Agent(Helper):
    """A torchrun agent, on a node of a network or on this machine."""

    def __init__(
        self, words: list[str], worker: str, threads: int, network: Network | None, index: int,
        variables: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        environ = {
            **os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": str(threads),
            "PYTHONSAFEPATH": "1", **(variables or {}),
        }  # fmt: skip
        node = network.node(index) if network else None
        super().__init__("labutils.launch.agent:main", words, node, worker, environ=environ)
        if network is not None:
            network.connect(index, self)

    def greet(self) -> tuple[Hello, list[socket.socket]] | None:
        """A rank that has started, and the notebook's ends of its connections; None: closed."""
        try:
            data, fds, _, _ = socket.recv_fds(self.channel, LONGEST, 2)
        except OSError:
            return None
        if not data:
            return None
        return Hello(*pickle.loads(data)), [adopt(socket.socket(fileno=fd)) for fd in fds]


def rendezvous(nodes: str, ranks: int, network: Network | None, port: int) -> list[str]:
    """torchrun's options for a job on so many ``nodes``, the same on each of them.

    Args:
        nodes: a number, or ``least:most``.
        port: of the notebook's store, which serves the rendezvous where there is no network.
    """
    words = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    if network is not None:
        return [*words, f"--rdzv-endpoint={network.names[0]}:{PORT}", "--rdzv-id=lab"]
    local = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lab", "--rdzv-conf=is_host=false"]
    return [*words, *local, "--local-addr=127.0.0.1"]


class ForkedJobRanks(JobRanks):
    """Ranks under torchrun agents that are forked."""

    def __init__(self, world: World, shape: tuple[str | None, str | None] | None = None) -> None:
        """``shape`` is the bandwidth and the delay of a network of namespaces; None: without."""
        super().__init__(world)
        self.shape = shape
        self.network: Network | None = None

    def create_processes(self) -> None:
        world = self.world
        if self.shape is not None:
            self.network = Network(world.nodes, *self.shape)
        self.processes = [JobProcess(rank, self.agents) for rank in range(world.size)]
        words = rendezvous(str(world.nodes), world.ranks, self.network, self.store.port)
        # Without a network of their own the ranks use the notebook's store.
        more = OWN_STORE if self.network is None else {}
        for index in range(world.nodes):  # one by one, so that a failure leaves none unknown
            self.agents.append(
                Agent([*words, "rank"], "rank", world.threads, self.network, index, more)
            )
        self._greet_all()

    def _greet_all(self) -> None:
        deadline, missing = time.monotonic() + START_S, self.world.size
        agents: dict[socket.socket, Any] = {agent.channel: agent for agent in self.agents}
        while missing:
            readable, _, _ = select.select(list(agents), [], [], 0.1)
            for sock in readable:
                greeted = agents[sock].greet()
                if greeted is None:
                    del agents[sock]
                    continue
                hello, (channel, output) = greeted
                process: Any = self.processes[hello.rank]
                process.channel, process.output = Channel(channel), output
                missing -= 1
            if missing:
                self._still_coming(deadline)

    def _variables(self, rank: int) -> dict[str, Any]:
        variables = super()._variables(rank)
        if self.network is None:
            return variables
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun has set them
            del variables[name]
        return variables | dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)

    def kill(self) -> None:
        super().kill()
        if self.network is not None:
            self.network.close()
            self.network = None
