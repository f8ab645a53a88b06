"""``labutils slurm``: the batch script that runs a training script on several nodes.

The script is for reading too: it says what each line is for.  It needs ``srun`` and ``scontrol``,
as every Slurm cluster has them, and labutils in the environment of the nodes.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from labutils.cluster import job as jobs
from labutils.cluster.job import Job

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?")
_OURS = {
    "nodes": "--nodes", "N": "--nodes", "time": "--time", "t": "--time",
    "gpus-per-node": "--gpus-per-node", "cpus-per-task": "--cpus-per-task", "c": "--cpus-per-task",
    "requeue": "--requeue", "no-requeue": "--requeue", "signal": "--signal-before",
    "ntasks": "", "n": "", "ntasks-per-node": "",
}  # fmt: skip
"""What the script says to sbatch itself: the option of this command for it; "" where it must be."""

HEAD = """\
#!/usr/bin/env bash
{directives}
#
# Submit this with: sbatch {file}
# Written by:       labutils slurm {words}
# shellcheck disable=SC2317 # the nodes run functions by their names
set -euo pipefail
{environment}
NODES=$SLURM_JOB_NUM_NODES
{settings}
export JOB="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"

# The nodes by name: node[001-003,7] is written out as node001 node002 node003 node7.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HOSTS=$(IFS=, && echo "${{hosts[*]}}")
export HOSTS

# Since Slurm 22.05 srun does not take this from the job by itself, and would use one core a task.
[[ -z ${{SLURM_CPUS_PER_TASK:-}} ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
"""

BODY = """\
# SIGUSR1 comes {before} s before the time is up and goes on to the ranks, which save and end.
time_is_up="" step=""
trap 'time_is_up=yes; [[ -z $step ]] || kill -USR1 "$step"' USR1

# Runs one of the functions above on every node, one task a node.
on_every_node() {{
    local run=$1
    shift
    exec srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --export=ALL \\
        --kill-on-bad-exit=0 --wait="$wait_s" \\
        {container}bash -c "$(declare -f "$run"); $run \\"\\$@\\"" "$run" "$@"
}}

# Where the nodes meet: an address of the first node at which others reach it, never loopback, and
# a port that comes from the job's number, so that two jobs on one node do not take the same.
meeting=$(srun --nodes=1 --ntasks=1 --nodelist="${{hosts[0]}}" --export=ALL \\
    {container}"$PYTHON" -m labutils.cluster.address --meet "${{hosts[0]}}" \\
    --seed "$SLURM_JOB_ID" --interface "$INTERFACE")
read -r MASTER_ADDR MASTER_PORT <<<"$meeting"
export MASTER_ADDR MASTER_PORT
echo "nodes: ${{hosts[*]}}; they meet at $MASTER_ADDR:$MASTER_PORT"
"""

CHECK = """
wait_s=0
if ! (on_every_node preflight "${{command[0]}}"); then
    echo "The preflight failed, so training was not started: see above which node is to blame." >&2
    exit 1
fi
"""

RUN = """
if [[ $time_is_up ]]; then
    echo "The time was up before training had begun: give the job a longer --time." >&2
    exit 1
fi
# A node that has ended, well or not, leaves the others two minutes: rank 0 may still be writing.
wait_s=120
on_every_node train "${{command[@]}}" &
step=$!
code=0
wait "$step" || code=$?
while [[ $code -gt 128 ]] && kill -0 "$step" 2>/dev/null; do # the trap has cut the wait short
    code=0
    wait "$step" || code=$?
done
if [[ $time_is_up && $code -ne 0 ]]; then
    {then}
fi
exit "$code"
"""

LEAVE = """echo "The time was up before training had ended." >&2"""
REQUEUE = """\
echo "The time was up: back into the queue, to go on from the checkpoint."
    scontrol requeue "$SLURM_JOB_ID\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils slurm``."""
    add = parser.add_argument
    add("--nodes", type=int, required=True, metavar="N", help="how many nodes")
    jobs.add_arguments(parser)
    add("--time", default="01:00:00", help="time limit, as sbatch takes it (default 01:00:00)")
    add("--partition", help="partition of the cluster")
    add("--account", help="account to charge")
    add("--cpus-per-task", type=int, metavar="N", help="cores of each node")
    add("--mem", help="memory of each node, like 64G")
    add("--sbatch", action="append", default=[], metavar="OPTION",
        help="one more option, as in --sbatch=--constraint=a100; may be repeated")  # fmt: skip
    add("--signal-before", type=int, default=120, metavar="SECONDS",
        help="how long before the time limit ranks get SIGUSR1, to save (default 120)")  # fmt: skip
    add("--requeue", action="store_true", help="queue the job again when its time is up, or a node "
        "fails: for scripts that go on from a checkpoint")  # fmt: skip
    add("--out", metavar="FILE", help="file to write (default SCRIPT.sbatch; - prints it)")
    add("--force", action="store_true", help="overwrite that file")


def main(arguments: argparse.Namespace) -> int:
    """Write the script, and say how to submit it."""
    job = jobs.from_arguments(arguments)
    _check(arguments)
    script = render(job, arguments)
    _check_syntax(script)
    if arguments.out == "-":
        print(script, end="")
        return 0
    path = Path(arguments.out or f"{job.name}.sbatch")
    if path.exists() and not arguments.force:
        raise ValueError(f"{path} exists already: name another --out, or overwrite with --force.")
    try:
        path.write_text(script, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}.") from None
    print(f"{path} is written. Submit it with: sbatch {shlex.quote(str(path))}")
    return 0


def render(job: Job, arguments: argparse.Namespace) -> str:
    """The whole script."""
    container = f"{job.container} " if job.container else ""
    head = HEAD.format(
        directives="\n".join(_directives(job, arguments)),
        file=f"{job.name}.sbatch" if arguments.out in (None, "-") else arguments.out,
        words=_words(job, arguments),
        environment=_environment(job),
        settings=jobs.settings(job),
    )
    check = CHECK.format() if job.preflight_s else ""
    run = RUN.format(then=REQUEUE if arguments.requeue else LEAVE)
    body = BODY.format(container=container, before=arguments.signal_before)
    return f"{head}\n{jobs.functions(job)}\n\n{body}{check}{run}"


def _check(arguments: argparse.Namespace) -> None:
    if arguments.nodes < 1:
        raise ValueError(f"--nodes must be at least 1, not {arguments.nodes}.")
    if not _TIME.fullmatch(arguments.time):
        raise ValueError(f"--time takes minutes, HH:MM:SS or D-HH, not {arguments.time!r}.")
    if not 0 <= arguments.signal_before <= 65535:
        raise ValueError(f"--signal-before is 0 to 65535 seconds, not {arguments.signal_before}.")
    if _seconds(arguments.time) <= arguments.signal_before:
        raise ValueError(
            f"--time {arguments.time} is over before SIGUSR1 could come, {arguments.signal_before} "
            "s before its end: give a longer --time or a shorter --signal-before."
        )
    for name in ("partition", "account", "mem"):
        if re.search(r"[\s;]", getattr(arguments, name) or ""):
            raise ValueError(f"--{name} is one word, not {getattr(arguments, name)!r}.")
    for option in arguments.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise ValueError(f"--sbatch takes one option with its dashes, not {option!r}.")
        name = re.split(r"[=\s]", option.lstrip("-") if option.startswith("--") else option[1:2])[0]
        if name in _OURS:
            how = f"use {_OURS[name]} of this command" if _OURS[name] else "it is one task a node"
            raise ValueError(f"--sbatch={option} would contradict the script: {how}.")


def _seconds(time: str) -> int:
    """sbatch's minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS."""
    found = _TIME.fullmatch(time)
    assert found is not None
    days, first, second, third = (int(part) if part else None for part in found.groups())
    if days is not None or third is not None:
        return (((days or 0) * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    return (first or 0) * 60 + (second or 0)


def _check_syntax(script: str) -> None:
    """Have bash read the script, where there is one: --setup may hold anything."""
    if bash := shutil.which("bash"):
        read = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True)
        if read.returncode:
            said = read.stderr.strip().splitlines()[0]
            raise ValueError(
                f"bash cannot read the script, look at --setup and --container: {said}"
            )


def _directives(job: Job, arguments: argparse.Namespace) -> Iterator[str]:
    """The lines that sbatch reads, each with what it is for where that is not plain."""
    options = {
        "job-name": job.name,
        "nodes": arguments.nodes,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": arguments.cpus_per_task,
        "mem": arguments.mem,
        "time": arguments.time,
        "partition": arguments.partition,
        "account": arguments.account,
        "chdir": Path.cwd(),
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
    yield from (f"#SBATCH {option}" for option in arguments.sbatch)
    yield "# One task a node: torchrun, which starts the node's ranks itself."
    yield "#SBATCH --ntasks-per-node=1"
    yield "# A job that is queued again goes on in the same log."
    yield "#SBATCH --output=%x-%j.out"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'' if arguments.requeue else 'no-'}requeue"
    yield "# Shortly before the time is up this shell, and only this shell, gets SIGUSR1."
    yield f"#SBATCH --signal=B:USR1@{arguments.signal_before}"


def _environment(job: Job) -> str:
    """The lines that make the environment ready; many of them trip over ``set -eu``."""
    if not job.setup:
        return ""
    return "\n".join(["", "set +eu", *job.setup, "set -eu", ""])


def _words(job: Job, arguments: argparse.Namespace) -> str:
    """The command as it could be typed again, on one line."""
    words = ["--nodes", arguments.nodes, "--gpus-per-node", job.gpus_per_node]
    words += ["--ranks-per-node", job.ranks_per_node, "...", job.script, *job.arguments]
    return " ".join(shlex.quote(str(word)) for word in words)
