"""``labutils ssh --hosts a,b train.py``: the same job on machines that ssh reaches, without Slurm.

Each machine runs its commands under the guard of :mod:`labutils.guard`, whose standard input
is the ssh connection: when this command ends, however it ends, the connections close and nothing is
left running anywhere.  The machines need the same folder at the same place, and labutils.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from labutils.cluster import job as jobs
from labutils.cluster.hostlist import expand
from labutils.cluster.job import Job

GRACE_S = 5.0
"""How long the other machines may still say what they see once one has failed."""
_ANSWER = re.compile(r"([\d.]+) (\d+)")
_GUARD = "from labutils.guard import main; main()"


class Machine:
    """One machine and what runs there at the moment."""

    def __init__(self, target: str) -> None:
        self.target, self.name = target, target.rpartition("@")[2]

    def start(self, line: str) -> None:
        """Run a line of bash there."""
        command = ["ssh", "-T", "-o", "BatchMode=yes", self.target, f"bash -c {shlex.quote(line)}"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise ValueError("there is no ssh on this machine: install OpenSSH.") from None
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.decode(errors="replace").rstrip("\n"))
            sys.stdout.write(f"[{self.name}] {self.said[-1]}\n")  # whole: others write too
            sys.stdout.flush()

    def code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Close the connection, which ends what runs there."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils ssh``."""
    parser.add_argument(
        "--hosts", required=True, help="the machines, the first of them node 0: a,b or node[01-04]"
    )
    jobs.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Find where to meet, let the machines check each other, train; the first bad exit code."""
    job = jobs.from_arguments(arguments)
    machines = [Machine(target) for target in expand(arguments.hosts)]
    names = [machine.name for machine in machines]
    if len(set(names)) < len(names):
        raise ValueError(f"--hosts names a machine twice: {arguments.hosts}.")
    where = _meeting(machines[0], job)
    if where is None:
        return 1
    print(f"nodes: {' '.join(names)}; they meet at {':'.join(where)}", flush=True)
    if job.preflight_s and (code := _on_all(machines, job, "preflight", where, together=False)):
        text = (
            "The preflight failed, so training was not started: see above which node is to blame."
        )
        print(text, file=sys.stderr)
        return code
    return _on_all(machines, job, "train", where, together=True)


def _meeting(first: Machine, job: Job) -> tuple[str, str] | None:
    """Address and port of node 0; None if it could not tell, and has said why."""
    seed, interface = str(os.getpid()), ["--interface", job.interface] if job.interface else []
    words = ["-m", "labutils.cluster.address", "--meet", first.name, "--seed", seed, *interface]
    first.start(f"{_ready(job)}\nexec {_in_container(job)}{shlex.join([job.python, *words])}")
    while first.code() is None:
        time.sleep(0.05)
    first.stop()
    # What is said about it may arrive before or after: ssh carries the two streams apart.
    answers = [found for line in first.said if (found := _ANSWER.fullmatch(line))]
    return (answers[-1][1], answers[-1][2]) if first.code() == 0 and answers else None


def _on_all(
    machines: Sequence[Machine], job: Job, function: str, where: tuple[str, str], together: bool
) -> int:
    """Run a function of :mod:`labutils.cluster.job` everywhere; ``together``: one ends all."""
    try:
        for rank, machine in enumerate(machines):
            machine.start(_line(machines, job, function, where, rank))
        failed_at: float | None = None
        while any(machine.code() is None for machine in machines):
            failed = any(machine.code() for machine in machines)
            if failed and together:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() > failed_at + GRACE_S:
                    break
            time.sleep(0.05)
        return next((code for machine in machines if (code := machine.code())), 0)
    finally:
        for machine in machines:
            machine.stop()


def _line(
    machines: Sequence[Machine], job: Job, function: str, where: tuple[str, str], rank: int
) -> str:
    variables = {
        "NODES": len(machines), "NODE_RANK": rank, "MASTER_ADDR": where[0],
        "MASTER_PORT": where[1], "JOB": f"ssh-{os.getpid()}",
        "HOSTS": ",".join(machine.name for machine in machines),
    }  # fmt: skip
    exports = "\n".join(f"export {name}={shlex.quote(str(v))}" for name, v in variables.items())
    call = shlex.quote(f'{jobs.functions(job)}\n{function} "$@"')
    guard = f'{shlex.quote(job.python)} -c {shlex.quote(_GUARD)} "$PPID" --'
    return (
        f"{_ready(job)}\n{exports}\n{jobs.settings(job)}\n"
        f'exec {guard} {_in_container(job)}bash -c {call} {function} "${{command[@]}}"'
    )


def _ready(job: Job) -> str:
    """Go to this folder, and make the environment ready."""
    return "\n".join([f"cd {shlex.quote(str(Path.cwd()))} || exit 1", *job.setup])


def _in_container(job: Job) -> str:
    return f"{job.container} " if job.container else ""
