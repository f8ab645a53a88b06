"""What a job says to sbatch: the options of ``labutils slurm`` for it, checked and written down."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from labutils.cluster.job import Job

CORES_PER_RANK = 4
"""For a rank's training loop and a few DataLoader workers; ``--cpus-per-task`` says otherwise."""
DEFAULT_REQUEUES = 20
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?")
_OPTION = re.compile(r"(--[a-zA-Z][\w-]*|-[a-zA-Z])(=|\s+|)(.*)")
_ONE_TASK, _HERE = "it is one task a node", "the script sets it itself"
_NO_ARRAY = "a job of several nodes cannot be an array here, so submit it several times"
_OURS = {
    "nodes": "--nodes", "N": "--nodes", "time": "--time", "t": "--time",
    "gpus-per-node": "--gpus-per-node", "gpus": "--gpus-per-node",
    "G": "--gpus-per-node", "cpus-per-task": "--cpus-per-task", "c": "--cpus-per-task",
    "cpus-per-gpu": "--cpus-per-task", "requeue": "--requeue",
    "no-requeue": "--requeue", "signal": "--signal-before",
    "ntasks": _ONE_TASK, "n": _ONE_TASK, "ntasks-per-node": _ONE_TASK,
    "ntasks-per-gpu": _ONE_TASK, "array": _NO_ARRAY, "a": _NO_ARRAY,
    "chdir": f"{_HERE}, to this folder", "D": f"{_HERE}, to this folder",
    "job-name": f"{_HERE}, to the training script's name",
    "J": f"{_HERE}, to the training script's name",
}  # fmt: skip
"""Options that ``--sbatch`` may not hold, since the script says them itself, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``labutils slurm`` that become directives."""
    add = parser.add_argument
    add("--time", default="01:00:00", help="time limit, as sbatch takes it (default 01:00:00)")
    add("--partition", help="partition of the cluster")
    add("--account", help="account to charge")
    add("--cpus-per-task", type=int, metavar="N", help="cores of each node, for all its ranks "
        f"together (default: {CORES_PER_RANK} a rank)")  # fmt: skip
    add("--mem", help="memory of each node, like 64G")
    add("--sbatch", action="append", default=[], metavar="OPTION",
        help="one more option, as in --sbatch=--constraint=a100; may be repeated")  # fmt: skip
    add("--signal-before", type=int, default=120, metavar="SECONDS",
        help="how long before the time limit ranks get SIGUSR1, to save (default 120)")  # fmt: skip
    add("--requeue", action="store_true", help="queue the job again when its time is up, or a node "
        "fails: for scripts that go on from a checkpoint")  # fmt: skip
    add("--max-requeues", type=int, default=DEFAULT_REQUEUES, metavar="N",
        help=f"how often --requeue does so, at most (default {DEFAULT_REQUEUES})")  # fmt: skip


def check(job: Job, arguments: argparse.Namespace) -> None:
    """ValueError says what sbatch would refuse, or what contradicts the script."""
    if arguments.nodes < 1:
        raise ValueError(f"--nodes must be at least 1, not {arguments.nodes}.")
    cores = arguments.cpus_per_task
    if cores is not None and cores < 1:
        raise ValueError(f"--cpus-per-task must be at least 1, not {cores}.")
    if arguments.max_requeues < 1:
        raise ValueError(f"--max-requeues must be at least 1, not {arguments.max_requeues}.")
    if arguments.mem is not None and not re.fullmatch(r"\d+(?:[KMGT]B?)?", arguments.mem.upper()):
        raise ValueError(f"--mem takes a whole number with K, M, G or T, not {arguments.mem!r}.")
    for name in ("partition", "account"):
        if re.search(r"[\s;]", getattr(arguments, name) or ""):
            raise ValueError(f"--{name} is one word, not {getattr(arguments, name)!r}.")
    _check_times(job, arguments)
    for option in arguments.sbatch:
        _check_option(option)


def directives(job: Job, arguments: argparse.Namespace) -> Iterator[str]:
    """The lines that sbatch reads, each with what it is for where that is not plain."""
    options = {
        "job-name": job.name,
        "nodes": arguments.nodes,
        "gpus-per-node": job.gpus_per_node or None,
        "mem": arguments.mem,
        "time": arguments.time,
        "partition": arguments.partition,
        "account": arguments.account,
        "chdir": Path.cwd(),
    }
    for name, value in options.items():
        if value is not None:
            yield f"#SBATCH --{name}={_quoted(str(value))}"
    yield "# One task a node: torchrun, which starts the node's ranks itself."
    yield "#SBATCH --ntasks-per-node=1"
    yield from _cores(job, arguments.cpus_per_task)
    yield "# A job that is queued again goes on in the same log."
    yield "#SBATCH --output=%x-%j.out"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'' if arguments.requeue else 'no-'}requeue"
    yield "# Shortly before the time is up this shell, and only this shell, gets SIGUSR1."
    yield f"#SBATCH --signal=B:USR1@{arguments.signal_before}"
    for option in arguments.sbatch:  # last, so that they count where the lines above say otherwise
        name, between, value = _parts(option)
        in_quotes = value[:1] in ("'", '"')
        yield f"#SBATCH {name}{between}{value if in_quotes else _quoted(value)}"


def _cores(job: Job, asked: int | None) -> Iterator[str]:
    """Without such a line many clusters give a task one core, whatever it starts."""
    why = "as asked for" if asked else f"{CORES_PER_RANK} a rank unless --cpus-per-task is given"
    yield f"# Cores of a node, for its {job.ranks_per_node} ranks together: {why}."
    yield f"#SBATCH --cpus-per-task={asked or CORES_PER_RANK * job.ranks_per_node}"


def _quoted(value: str) -> str:
    """In double quotes where sbatch would otherwise end the value, at a blank or ``#``."""
    if not value.isprintable():
        raise ValueError(f"sbatch cannot be told {value!r}, which is more than one line of text.")
    if re.fullmatch(r"""[^\s#"'\\]*""", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _check_times(job: Job, arguments: argparse.Namespace) -> None:
    time, before = arguments.time, arguments.signal_before
    if not _TIME.fullmatch(time):
        raise ValueError(f"--time takes minutes, HH:MM:SS or D-HH, not {time!r}.")
    if not 0 <= before <= 65535:
        raise ValueError(f"--signal-before is 0 to 65535 seconds, not {before}.")
    if _seconds(time) <= before:
        raise ValueError(
            f"--time {time} is over before SIGUSR1 could come, {before} "
            "s before its end: give a longer --time or a shorter --signal-before."
        )
    if _seconds(time) <= job.preflight_s:
        raise ValueError(
            f"--time {time} may be over before the preflight is, which waits {job.preflight_s:g} "
            "s: give a longer --time or a shorter --preflight-timeout."
        )


def _check_option(option: str) -> None:
    instead = _OURS.get(_parts(option)[0].lstrip("-"))
    if instead:
        how = f"use {instead} of this command" if instead.startswith("--") else instead
        raise ValueError(f"--sbatch={option} would contradict the script: {how}.")


def _parts(option: str) -> tuple[str, str, str]:
    """Name, what is between, and value of ``--mem=4G``, ``-C a100``, ``--exclusive``."""
    found = _OPTION.fullmatch(option)
    if not found:
        raise ValueError(f"--sbatch takes one option with its dashes, not {option!r}.")
    return found[1], found[2], found[3]


def _seconds(time: str) -> int:
    """sbatch's minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS."""
    found = _TIME.fullmatch(time)
    assert found is not None
    days, first, second, third = (int(part) if part else None for part in found.groups())
    if days is not None or third is not None:
        return (((days or 0) * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    return (first or 0) * 60 + (second or 0)
