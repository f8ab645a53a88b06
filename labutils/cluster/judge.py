"""From what the nodes told to what is wrong, with the name of the node that is to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from labutils.cluster.facts import Facts
from labutils.doctor import PROBLEM, SHM_PROBLEM, SHM_WARNING, WARNING, Finding

CLOCK_WARNING_S, CLOCK_PROBLEM_S = 0.5, 30.0
"""Clocks this far apart spoil logs and traces; this far, also tokens and time stamps of files."""


def judge(told: Sequence[Facts], hosts: Sequence[str], gpus: int, ranks: int = 1) -> list[Finding]:
    """All findings; ``hosts`` names who was to come.

    Each node must see ``gpus`` GPUs, and should have a core for each of its ``ranks``.
    """
    nodes = sorted(told, key=lambda node: node.rank)
    sound = [node for node in nodes if not node.trouble]
    return [
        *_who_came(nodes, hosts),
        *_versions(sound),
        *(finding for node in sound for finding in _one(node, gpus, ranks)),
    ]


def table(told: Sequence[Facts]) -> str:
    """One line for each node."""
    lines = [("node", "name", "address", "interface", "GPUs", "PyTorch", "/dev/shm", "clock")]
    for node in sorted(told, key=lambda node: node.rank):
        shm = "none" if node.shared_memory is None else f"{node.shared_memory / 2**30:.2f} GiB"
        clock = f"{node.clock_ahead * 1e3:+.1f} ± {node.clock_error * 1e3:.1f} ms"
        lines.append((
            str(node.rank), node.host, node.address, node.interface, _counted(node.gpus),
            node.versions.get("PyTorch", "?"), shm, clock,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _who_came(nodes: Sequence[Facts], hosts: Sequence[str]) -> Iterator[Finding]:
    came = Counter(node.host for node in nodes)
    ranks = Counter(node.rank for node in nodes)
    for node in nodes:
        if node.trouble:
            way_out = "the same command in a shell on that node shows more"
            yield Finding(node.host, PROBLEM, node.trouble, way_out)
    for host in hosts:
        if not came[host]:
            way_out = "what it says itself stands in its own lines of this log"
            yield Finding(host, PROBLEM, "did not come to the meeting", way_out)
    for host, count in came.items():
        if count > 1:
            way_out = "start one task a node (--ntasks-per-node=1): torchrun starts the ranks"
            yield Finding(host, PROBLEM, f"came {count} times", way_out)
    for rank, count in ranks.items():
        if count > 1:
            who = " and ".join(node.host for node in nodes if node.rank == rank)
            way_out = "give each node a number of its own, from 0"
            yield Finding(who, PROBLEM, f"both call themselves node {rank}", way_out)


def _versions(nodes: Sequence[Facts]) -> Iterator[Finding]:
    """The odd ones out; where there is no majority, node 0 is right."""
    for name in nodes[0].versions if nodes else ():
        counts = Counter(node.versions.get(name, "none") for node in nodes)
        usual = counts.most_common(1)[0][0]
        for node in nodes:
            mine = node.versions.get(name, "none")
            if mine != usual:
                way_out = "activate the same environment on every node, from a shared folder"
                text = f"has {name} {mine}, where {usual} is usual"
                yield Finding(node.host, PROBLEM, text, way_out)


def _one(node: Facts, gpus: int, ranks: int) -> Iterator[Finding]:
    if len(node.gpus) < gpus:
        way_out = "ask for GPUs (--gpus-per-node), and see what CUDA_VISIBLE_DEVICES leaves there"
        yield Finding(node.host, PROBLEM, f"sees {len(node.gpus)} of {gpus} GPUs", way_out)
    if node.cores is not None and node.cores < ranks:
        cores = "1 core" if node.cores == 1 else f"{node.cores} cores"
        text = f"has {cores} for {ranks} ranks, which will wait for each other"
        way_out = "ask for cores (--cpus-per-task): at least one a rank, better four"
        yield Finding(node.host, WARNING, text, way_out)
    shm = node.shared_memory
    if shm is not None and shm < SHM_WARNING:
        level = PROBLEM if shm < SHM_PROBLEM else WARNING
        way_out = "give its container more (--shm-size=2g), or bind the host's /dev/shm"
        yield Finding(node.host, level, f"has {shm / 2**20:.0f} MiB of /dev/shm", way_out)
    for name, why in node.unreachable.items():
        way_out = "open all ports between the nodes, or name another --interface"
        yield Finding(node.host, PROBLEM, f"cannot reach {name}: {why}", way_out)
    if node.unresolved:
        text = f"cannot resolve {', '.join(node.unresolved)}"
        way_out = "addresses are used here, but programs that use names will fail: see /etc/hosts"
        yield Finding(node.host, WARNING, text, way_out)
    ahead = abs(node.clock_ahead) - node.clock_error
    if ahead > CLOCK_WARNING_S:
        level = PROBLEM if ahead > CLOCK_PROBLEM_S else WARNING
        text = f"has a clock {node.clock_ahead:+.1f} s from node 0's"
        yield Finding(node.host, level, text, "let the node keep time (chrony or ntpd)")


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in Counter(names).items()) or "none"
