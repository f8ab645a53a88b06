"""``lab.rehearse``: a script under one torchrun per node, with the faults that clusters have.

Each node's torchrun gets the line that a person would type in a terminal of that node, and the
rendezvous, restarts and renumbering are torchrun's own.  A fault comes after a step of rank 0, and
rank 0 waits with its next step until the fault is there, so that what is lost can be counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from labutils.folders import find_script
from labutils.launch import output, story
from labutils.launch.forked import rendezvous
from labutils.launch.network import Network
from labutils.launch.pool import loopback_store
from labutils.launch.processes import forking_is_safe
from labutils.launch.rehearsal import Job
from labutils.launch.story import Rehearsal, RehearsalFailed
from labutils.launch.world import World

QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
"""``--rdzv-conf`` of a rehearsal: a lost node is given up after three seconds instead of fifteen,
and a node that may still come is waited for during two seconds instead of thirty."""


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
    if max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts}: a job cannot be restarted less than never.")
    if least == most and any("joins" in fault for fault in faults or {}):
        raise ValueError(
            f"nodes={nodes!r} waits for all nodes before it starts, so none can join later: "
            f"write nodes='1:{most}'."
        )
    script = script if os.path.isfile(script) else find_script(script)  # shown as it was typed
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
        job = Job(words, world, net, wanted, timeout, show or (lambda _: None))
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


__all__ = ["Rehearsal", "RehearsalFailed", "rehearse"]
