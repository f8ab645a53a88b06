"""Jobs: ranks that torchrun starts, one agent per node, each agent under a guard.

Where forking is safe, :mod:`labutils.launch.forked` starts agents and ranks faster.

On this machine several agents rehearse several nodes, with the same rendezvous as in production.
The rendezvous and the process group's store are in the notebook, on the loopback address, so
nothing else listens and no port is chosen.  Each rank connects back through a socket that only this
user can open, and from then on it is a rank like any other.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from labutils.guard import alive, python
from labutils.launch.pool import START_S, Ranks, StartError
from labutils.launch.processes import Process, adopt
from labutils.launch.wire import Channel
from labutils.launch.world import World

EXIT = re.compile(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_AGENT_S = 8.0  # how long an agent may take to say how its rank ended


class Agent:
    """A torchrun agent under its guard."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the agent
        self._guard = subprocess.Popen(
            python("labutils.guard:main", os.getpid(), "--", *command),
            stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True, env=environment,
        )  # fmt: skip

    def ended(self) -> bool:
        return self._guard.poll() is not None

    def log(self) -> str:
        """What torchrun itself has said."""
        position = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), position, 0).decode(errors="replace")

    def close(self) -> None:
        """End the agent and its ranks."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        try:
            self._guard.wait(4)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


class JobProcess:
    """A rank that torchrun has started; its agent knows how it ended."""

    def __init__(self, rank: int, agents: list[Any]) -> None:
        self.rank, self.pid, self._agents = rank, 0, agents
        self.channel: Channel
        self.output: socket.socket
        self._code: int | None = None
        self._gone_at = 0.0

    def exit_code(self) -> int | None:
        if self._code is None and (not self.pid or not alive(self.pid)):
            self._gone_at = self._gone_at or time.monotonic()
            self._code = self._reported()
            if self._code is None and time.monotonic() > self._gone_at + _AGENT_S:
                self._code = -signal.SIGKILL
        return self._code

    def _reported(self) -> int | None:
        for agent in self._agents:
            for rank, code in EXIT.findall(agent.log()):
                if int(rank) == self.rank:
                    return int(code)
        if not (self._agents and all(agent.ended() for agent in self._agents)):
            return None
        # Of several that end, an agent names one or all; it has ended those that it does not name.
        failed = any(EXIT.search(agent.log()) for agent in self._agents)
        return -signal.SIGTERM if failed else 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.pid and self._code is None and alive(self.pid):
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def close(self) -> None:
        for name in ("channel", "output"):
            if hasattr(self, name):
                getattr(self, name).close()


class JobRanks(Ranks):
    """Ranks under torchrun."""

    def __init__(self, world: World) -> None:
        if sys.platform == "win32":
            raise RuntimeError("torchrun jobs need Linux or macOS; use nodes=1 here.")
        super().__init__(world)
        self.agents: list[Any] = []

    def create_processes(self) -> None:
        self.processes = [JobProcess(rank, self.agents) for rank in range(self.world.size)]
        path = str(self._folder / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(2 * self.world.size)
            self.agents += [
                Agent(self._command(path), self._agent_environment())
                for _ in range(self.world.nodes)
            ]
            self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        """Take the two connections of each rank."""
        deadline = time.monotonic() + START_S
        listener.settimeout(0.1)
        for _ in range(2 * self.world.size):
            while True:
                try:
                    sock, _ = listener.accept()
                    break
                except TimeoutError:
                    self._still_coming(deadline)
            sock.setblocking(True)
            which, rank = sock.recv(1), int.from_bytes(sock.recv(4), "big")
            process: Any = self.processes[rank]
            if which == b"C":
                process.channel = Channel(adopt(sock))
            else:
                process.output = adopt(sock)

    def _still_coming(self, deadline: float) -> None:
        ended = [agent for agent in self.agents if agent.ended()]
        if ended or time.monotonic() > deadline:
            said = (ended or self.agents)[0].log().strip()[-2000:]
            raise StartError(f"torchrun did not bring the ranks up:\n{said}")

    def _command(self, path: str) -> list[str]:
        world = self.world
        torchrun = [
            sys.executable, "-m", "torch.distributed.run",
            f"--nnodes={world.nodes}", f"--nproc-per-node={world.ranks}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.store.port}",
            f"--rdzv-id=labutils-{os.getpid()}", "--rdzv-conf=is_host=false",
            "--local-addr=127.0.0.1", "--no-python",
        ]  # fmt: skip
        return torchrun + python("labutils.launch.spawned:connect", path)

    def _agent_environment(self) -> dict[str, str]:
        return {
            **os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": str(self.world.threads), "PYTHONSAFEPATH": "1",
        }  # fmt: skip

    def environment(self) -> dict[str, str] | None:
        return None  # torchrun has set it

    def kill(self) -> None:
        super().kill()
        for agent in self.agents:
            agent.close()

    def explain_start(self, process: Process) -> str:
        said = "\n".join(agent.log() for agent in self.agents).strip()
        return super().explain_start(process) + (f"\n{said[-2000:]}" if said else "")
