"""torchrun in a process that has imported torch already; its ranks are forked from it.

The agent is torchrun itself, with its own arguments, rendezvous and restarts.  Only the way its
ranks start differs: forked from the agent instead of started as fresh interpreters, each of which
would import torch for seconds.  (Nothing has been computed in the agent, so a fork is safe.)
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from labutils.launch.helper import die_with_parent
from labutils.launch.network import Node, enter

_channel: socket.socket
_agent: int


class Hello(NamedTuple):
    """What a rank says of itself when it starts."""

    pid: int
    rank: int
    local_rank: int
    world_size: int
    restarts: int
    """Restarts that its agent has counted."""


def main(channel: socket.socket, words: list[str], node: Node | None, worker: str) -> None:
    """Be ``torchrun WORDS`` on ``node``; ``worker`` names what its ranks are: WORKERS."""
    global _channel, _agent
    _channel, _agent = channel, os.getpid()
    if node is not None:
        enter(channel, node)
    from torch.distributed import run

    launch = run.elastic_launch

    def launch_by_forking(config: Any, entrypoint: Any) -> Callable[..., Any]:
        config.start_method = "fork"
        return launch(config=config, entrypoint=WORKERS[worker])

    run.elastic_launch = launch_by_forking  # type: ignore[assignment, misc]
    run.main([f"--log-dir={os.devnull}", *words])  # an agent that is killed leaves no files then


def _connect(connections: int) -> list[socket.socket]:
    """Introduce this rank to the notebook; returns its ends of so many connections."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's handler came with the fork
    die_with_parent(_agent)
    pairs = [socket.socketpair() for _ in range(connections)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    hello = Hello(os.getpid(), *(int(os.environ[name]) for name in names))
    socket.send_fds(_channel, [pickle.dumps(tuple(hello))], [their.fileno() for _, their in pairs])
    for _, theirs in pairs:
        theirs.close()
    return [mine for mine, _ in pairs]


def be_rank(*_: Any) -> None:
    """Be a rank of ``lab.launch``: the notebook says what to run."""
    import labutils.launch.rank as rank

    sys.exit(rank.main(*_connect(2)))


def run_script(*words: str) -> None:
    """Run the script that torchrun was given, as its own interpreter would."""
    import torch

    (output,) = _connect(1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = _Answered(output)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = [word for word in words if word != "-u"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class _Answered:
    """Standard output that goes on after each line only when the notebook has read it.

    So a fault that is to come after a certain line comes before anything else happens.
    """

    encoding, errors = "utf-8", "replace"

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._rest = sock, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._sock.sendall(b"\0" + line.encode("utf-8", "replace") + b"\n")
            self._sock.recv(1)
        return len(text)

    def flush(self) -> None:
        """Lines go out at once; a part of one waits for its end."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 1


WORKERS = {"rank": be_rank, "script": run_script}
"""What the ranks of an agent can be."""
