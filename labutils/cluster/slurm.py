"""``labutils slurm``: the batch script that runs a training script on several nodes.

The script is for reading too: it says what each line is for.  It needs ``srun`` and ``scontrol``,
as every Slurm cluster has them, and labutils in the environment of the nodes.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from labutils.cluster import job as jobs
from labutils.cluster import sbatch
from labutils.cluster.job import Job

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
if [[ ${{SLURM_RESTART_COUNT:-0}} -ge {limit} ]]; then
        echo "The time was up again, but the job is not queued once more" \\
            "(--max-requeues {limit}): does the script go on from its checkpoint, and does it" \\
            "get from one checkpoint to the next within --time?" >&2
    else
        echo "The time was up: back into the queue, to go on from the checkpoint."
        scontrol requeue "$SLURM_JOB_ID"
    fi"""
NO_RESUME = (
    "labutils slurm: --requeue starts {script} again from its first line, and no argument of it "
    'says "resume": make sure that it goes on from its checkpoint.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils slurm``."""
    add = parser.add_argument
    add("--nodes", type=int, required=True, metavar="N", help="how many nodes")
    jobs.add_arguments(parser)
    sbatch.add_arguments(parser)
    add("--out", metavar="FILE", help="file to write (default SCRIPT.sbatch; - prints it)")
    add("--force", action="store_true", help="overwrite that file")


def main(arguments: argparse.Namespace) -> int:
    """Write the script, and say how to submit it."""
    job = jobs.from_arguments(arguments)
    sbatch.check(job, arguments)
    script = render(job, arguments)
    _check_syntax(script)
    if arguments.requeue and not any("resume" in word for word in job.arguments):
        print(NO_RESUME.format(script=job.script), file=sys.stderr)
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
        directives="\n".join(sbatch.directives(job, arguments)),
        file=_one_line([f"{job.name}.sbatch" if arguments.out in (None, "-") else arguments.out]),
        words=_words(job, arguments),
        environment=_environment(job),
        settings=jobs.settings(job),
    )
    check = CHECK.format() if job.preflight_s else ""
    requeue = REQUEUE.format(limit=arguments.max_requeues)
    run = RUN.format(then=requeue if arguments.requeue else LEAVE)
    body = BODY.format(container=container, before=arguments.signal_before)
    return f"{head}\n{jobs.functions(job)}\n\n{body}{check}{run}"


def _check_syntax(script: str) -> None:
    """Have bash read the script, where there is one: --setup may hold anything."""
    if bash := shutil.which("bash"):
        read = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True)
        if read.returncode:
            said = read.stderr.strip().splitlines()[0]
            raise ValueError(
                f"bash cannot read the script, look at --setup and --container: {said}"
            )


def _environment(job: Job) -> str:
    """The lines that make the environment ready; many of them trip over ``set -eu``."""
    if not job.setup:
        return ""
    return "\n".join(["", "set +eu", *job.setup, "set -eu", ""])


def _words(job: Job, arguments: argparse.Namespace) -> str:
    """The command as it could be typed again, on one line."""
    words = ["--nodes", arguments.nodes, "--gpus-per-node", job.gpus_per_node]
    words += ["--ranks-per-node", job.ranks_per_node, "...", job.script, *job.arguments]
    return _one_line(words)


def _one_line(words: Sequence[object]) -> str:
    """Quoted for the shell, in a comment: a line break within a word would end that."""
    return " ".join(shlex.join(map(str, words)).splitlines())
