"""A cluster on this machine: nodes in network namespaces, with srun, scontrol and ssh to them.

Each node has a host name, a network interface, an ``/etc/hosts`` and mounts of its own; the files
are shared, as on a real cluster.  Making one needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ENTER = """
ip link set lo up; hostname "$1"; mount --bind "$2" /etc/hosts
eval "$3"; cd "$4"; shift 4; exec "$@"
"""
"""How a command gets into a node: its name, its hosts file, what is broken there, the folder."""

REAPER = """
cat >/dev/null
for space in "$@"; do
    while pids=$(ip netns pids "$space" 2>/dev/null) && [ -n "$pids" ]; do
        kill -9 $pids 2>/dev/null; sleep 0.02
    done
    ip netns del "$space" 2>/dev/null
done
"""
"""Takes the nodes down when its standard input ends: with the test, even one that is killed."""


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing: apt-get install iproute2 util-linux"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True
    )
    return probe.stderr.strip()


class Cluster:
    """Nodes called node01, node02, ... at 10.77.0.1, 10.77.0.2, ... on one bridge."""

    def __init__(self, folder: Path, nodes: int = 2, broken: Mapping[str, str] = {}) -> None:
        """``broken`` maps a node's name to a shell line that is run there before each command."""
        self.folder = folder
        self.nodes = [f"node{number:02}" for number in range(1, nodes + 1)]
        self.broken = broken
        self.programs = folder / "bin"
        self._prefix = f"lab{os.getpid()}"
        self._net = f"{self._prefix}-net"

    def __enter__(self) -> Cluster:
        if reason := why_not():
            pytest.skip(reason)
        spaces = [*map(self.namespace, self.nodes), self._net]
        self._reaper = subprocess.Popen(
            ["sh", "-c", REAPER, "sh", *spaces], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._make_network()
            self._make_programs()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def namespace(self, node: str) -> str:
        return f"{self._prefix}-{node}"

    def enter(self, node: str, folder: Path) -> list[str]:
        """What to put in front of a command that is to run on a node."""
        words = [node, str(self.folder / "hosts"), self.broken.get(node, ":"), str(folder)]
        inside = ["unshare", "--uts", "--mount", "sh", "-c", ENTER, "sh", *words]
        return ["ip", "netns", "exec", self.namespace(node), *inside]

    def environment(self, **more: str) -> dict[str, str]:
        """This process's environment, with the cluster's programs first on the path."""
        path = f"{self.programs}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "FAKE_CLUSTER": str(self.programs / "nodes"), **more}

    def processes(self) -> list[int]:
        """The processes that run on the nodes."""
        found: list[int] = []
        for node in self.nodes:
            command = ["ip", "netns", "pids", self.namespace(node)]
            found += map(
                int, subprocess.run(command, capture_output=True, text=True).stdout.split()
            )
        return found

    def close(self) -> None:
        """Let the reaper take everything down."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()

    def _make_network(self) -> None:
        net = self._net
        _ip("netns", "add", net)
        _ip("-n", net, "link", "add", "bridge", "type", "bridge")
        _ip("-n", net, "link", "set", "bridge", "up")
        for number, node in enumerate(self.nodes, 1):
            space = self.namespace(node)
            _ip("netns", "add", space)
            _ip("-n", net, "link", "add", f"to{number}", "type", "veth",
                "peer", "name", "eth0", "netns", space)  # fmt: skip
            _ip("-n", net, "link", "set", f"to{number}", "master", "bridge", "up")
            _ip("-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
        names = [f"10.77.0.{number} {node}" for number, node in enumerate(self.nodes, 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def _make_programs(self) -> None:
        self.programs.mkdir()
        enter = {node: self.enter(node, Path(".")) for node in self.nodes}
        (self.programs / "nodes").write_text(json.dumps(enter))
        for name in ("srun", "scontrol", "ssh"):
            write_program(self.programs / name)


def write_program(path: Path) -> None:
    """Make ``path`` run the program of its name in fake_programs.py."""
    program = Path(__file__).with_name("fake_programs.py")
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {program} {path.name} "$@"\n')
    path.chmod(0o755)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def left_over() -> Iterator[str]:
    """Namespaces of clusters that this process made and that are still there."""
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return (line for line in shown.splitlines() if line.startswith(f"lab{os.getpid()}-"))
