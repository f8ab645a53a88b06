"""A rehearsed network: each node in namespaces of its own, joined by shaped links (Linux, root).

A node has its own network, host name and table of hosts: ``node0`` at 10.77.0.1, ``node1`` at
10.77.0.2 and so on, each with one interface, ``eth0``.  Ports, addresses and interfaces are then
those of separate machines.  The namespaces have no names and belong to processes only, so that the
kernel removes all of it, links included, when these processes end, however they end.

What a node sends passes a token bucket (``tc tbf``), which limits the bandwidth.  Without a delay a
bridge joins the nodes.  With one, a small process takes each packet and hands it on later
(:mod:`labutils.launch.switch`); it works on kernels without ``netem`` as well.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import lru_cache
from typing import NamedTuple

from labutils.launch.processes import Helper

INTERFACE = "eth0"
"""What each node's one interface is called."""

MTU = 9000
"""Bytes of a packet, as clusters have them: headers are 0.7 % of it."""

_ON_A_NODE = "LABUTILS_NODE"  # set below the agent of a node
_ANSWER_S = 60.0  # for a few commands, on a machine that may be very busy
_BURST = 70_000  # bytes that pass at once: one large packet before it is cut (64 KiB and headers)
_NEWNS, _NEWUTS, NEWNET = 0x00020000, 0x04000000, 0x40000000  # unshare(2)
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SLOWEST, _LONGEST_S = 1e5, 0.5
"""Beyond these the rendezvous itself, some hundred messages, would take minutes."""
_PROBE = (
    "ip link add dev one type veth peer name two && ip link add dev three type bridge && "
    "tc qdisc add dev one root tbf"
)


class Node(NamedTuple):
    """What a node is to be."""

    number: int
    name: str
    nodes: tuple[str, ...]
    """Names of all nodes, by index."""
    bandwidth: float
    """Bits per second that it can send; 0: as much as the machine can."""


def bits_per_second(text: str | None) -> float:
    """``"1gbit"`` as a number, in the units of ``tc``; 0 for None (not limited).

    Raises ValueError for anything else, and for less than 100 kbit.
    """
    rate = 0.0 if text is None else _number(text, _UNITS, "bandwidth", "200mbit")
    if 0 < rate < _SLOWEST:
        raise ValueError(
            f"bandwidth={text!r}: at less than 100kbit the nodes would need minutes to find each "
            "other."
        )
    return rate


def seconds(text: str | None) -> float:
    """``"2ms"`` as a number; 0 for None.

    Raises ValueError for anything else, and for more than half a second.
    """
    delay = 0.0 if text is None else _number(text, _TIMES, "delay", "2ms")
    if delay > _LONGEST_S:
        raise ValueError(
            f"delay={text!r}: with more than 500ms each way the nodes would need minutes to find "
            "each other."
        )
    return delay


def _number(text: str, units: dict[str, float], what: str, example: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", str(text).lower())
    if not found or found[2] not in units or not float(found[1]):
        known = ", ".join(units)
        raise ValueError(
            f"{what}={text!r} is no {what}: write a number and one of {known}, such as {example!r}."
        )
    return float(found[1]) * units[found[2]]


@lru_cache(maxsize=1)
def missing() -> str:
    """Why nodes cannot have namespaces of their own here, in one sentence; "" where they can."""
    if sys.platform != "linux":
        return "Network namespaces are a part of Linux."
    if os.geteuid() != 0:
        return "Network namespaces need root."
    tools = [name for name in ("ip", "tc", "unshare", "mount") if shutil.which(name) is None]
    if tools:
        return f"Network namespaces need {', '.join(tools)} (packages iproute2 and util-linux)."
    probe = f"{_PROBE} rate 1mbit burst {_BURST} latency 1s"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", probe], capture_output=True, text=True
    )
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"This system does not allow shaped network namespaces ({why})."
    return ""


class Network:
    """The network of ``nodes`` nodes; :meth:`close` it, or let this process end."""

    def __init__(self, nodes: int, bandwidth: str | None = None, delay: str | None = None) -> None:
        """Raises ValueError for an impossible bandwidth or delay, RuntimeError where there can be
        no namespaces (see :func:`missing`)."""
        self.bandwidth, self.delay = bits_per_second(bandwidth), seconds(delay)
        if reason := missing():
            raise RuntimeError(reason)
        width = len(str(nodes - 1))
        self.names = tuple(f"node{index:0{width}d}" for index in range(nodes))
        self.switch = Helper("labutils.launch.switch:main", self.delay, environ=dict(os.environ))
        self._answer(self.switch)

    def node(self, index: int) -> Node:
        return Node(index, self.names[index], self.names, self.bandwidth)

    def connect(self, index: int, helper: Helper) -> None:
        """Plug in a helper that has begun to :func:`enter` the node ``index``."""
        pid = self._answer(helper)
        self.switch.channel.send(f"{index} {pid}".encode())
        self._answer(self.switch)
        helper.channel.send(b"plugged in")
        self._answer(helper)

    def _answer(self, helper: Helper) -> str:
        """What the helper says next; one that has ended, or says nothing, is a RuntimeError."""
        helper.channel.settimeout(_ANSWER_S)
        try:
            text = helper.channel.recv(1024).decode()
        except TimeoutError:
            text = ""
        if not text:
            helper.close()
            why = helper.log().strip() or f"a node said nothing for {_ANSWER_S:.0f} s"
            raise RuntimeError(f"the rehearsed network could not be built: {why}")
        return text

    def close(self) -> None:
        self.switch.close()


# -- in the node's own processes -------------------------------------------------------------------


def enter(channel: socket.socket, node: Node) -> None:
    """Move this process into namespaces of its own, as ``node``; the notebook plugs it in."""
    unshare(NEWNET | _NEWUTS | _NEWNS)
    socket.sethostname(node.name)
    os.environ[_ON_A_NODE] = node.name
    _hosts(node.nodes)
    channel.send(str(os.getpid()).encode())
    channel.recv(64)
    run("ip", "link", "set", "lo", "up")
    run("ip", "addr", "add", f"{address(node.number)}/24", "dev", INTERFACE)
    run("ip", "link", "set", INTERFACE, "up")
    if node.bandwidth:
        limit(node.bandwidth)
    channel.send(b"ready")


def address(index: int) -> str:
    """The address of a node."""
    return f"10.77.0.{index + 1}"


def limit(bandwidth: str | float) -> None:
    """In a rank: limit what this node sends, from now on, to e.g. ``"200mbit"``.

    Raises RuntimeError where the node has no interface of its own.
    """
    rate = bits_per_second(bandwidth) if isinstance(bandwidth, str) else bandwidth
    if not limited():
        raise RuntimeError("limit(...) is for ranks that run with network='namespaces'.")
    run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", f"{rate:.0f}bit",
         "burst", str(_BURST), "latency", "1s")  # fmt: skip


def limited() -> bool:
    """Whether this process is on a node that :func:`limit` can be used on."""
    return _ON_A_NODE in os.environ


def unshare(flags: int) -> None:
    """Give this process namespaces of its own; raises OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")


def _hosts(names: tuple[str, ...]) -> None:
    """Let this process, and only those below it, find the nodes by their names."""
    lines = ["127.0.0.1 localhost", *(f"{address(i)} {name}" for i, name in enumerate(names))]
    run("mount", "--make-rprivate", "/")
    with tempfile.NamedTemporaryFile("w", prefix="labutils-hosts-") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        run("mount", "--bind", file.name, "/etc/hosts")


def run(*words: str) -> None:
    """Run a command; raises RuntimeError with what it says if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
