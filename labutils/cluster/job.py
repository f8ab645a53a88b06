"""What is to be run on how many nodes, and the lines that each node executes for it."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from labutils.folders import find_script

DEFAULT_PREFLIGHT_S = 120
_HUNG_S = 90
"""A preflight ends within a minute after its timeout; this much later it hangs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training script on several nodes."""

    script: str
    arguments: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int
    python: str
    setup: tuple[str, ...]
    """Shell lines that make the environment ready, on each node: ``module load cuda``."""
    container: str
    """A command in front of everything that the nodes run: ``apptainer exec --nv image.sif``."""
    interface: str
    max_restarts: int
    preflight_s: float
    """Seconds that the preflight waits for all nodes; 0 leaves it out."""

    @property
    def name(self) -> str:
        return Path(self.script).stem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that ``labutils slurm`` and ``labutils ssh`` share."""
    add = parser.add_argument
    add("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of each node")
    add("--ranks-per-node", type=int, metavar="N", help="ranks of each node (default: its GPUs)")
    add("--python", metavar="PATH", help="the nodes' Python (default: this one; python with "
        "--setup or --container)")  # fmt: skip
    add("--setup", action="append", default=[], metavar="LINE",
        help="a shell line before all else: 'module load cuda', 'source venv/bin/activate'; "
        "may be repeated")  # fmt: skip
    add("--container", default="", metavar="COMMAND",
        help="a command to run everything in: 'apptainer exec --nv image.sif'")  # fmt: skip
    add("--interface", default="", metavar="NAME", help="network interface of the nodes, like ib0 "
        "(default: the one that leads to the first node)")  # fmt: skip
    add("--max-restarts", type=int, default=0, metavar="N",
        help="how often the ranks start anew when one fails (default 0)")  # fmt: skip
    add("--preflight-timeout", type=float, default=DEFAULT_PREFLIGHT_S, metavar="SECONDS",
        help="how long to wait until all nodes have looked at each other (default 120; 0: train "
        "without a preflight)")  # fmt: skip
    add("script", help="the training script; what follows are its own arguments")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def from_arguments(arguments: argparse.Namespace) -> Job:
    """The job that was asked for; ValueError says what makes no sense in it."""
    gpus = arguments.gpus_per_node
    ranks = gpus if arguments.ranks_per_node is None else arguments.ranks_per_node
    _demand(gpus >= 0, f"--gpus-per-node must not be negative, as {gpus} is.")
    _demand(ranks >= 1, "say how many ranks a node runs: --gpus-per-node 4, or on nodes without "
            "GPUs --ranks-per-node 2.")  # fmt: skip
    _demand(not gpus or ranks <= gpus, f"{ranks} ranks cannot share {gpus} GPUs a node: NCCL wants "
            "a GPU for each rank.")  # fmt: skip
    _demand(arguments.max_restarts >= 0, "--max-restarts must not be negative.")
    wait = arguments.preflight_timeout
    _demand(0 <= wait < math.inf, f"--preflight-timeout is 0 or more seconds, not {wait:g}.")
    script = _script(arguments.script)
    for line in (*arguments.setup, arguments.container):
        _demand("\n" not in line, f"{line!r} has more than one line.")
    name = arguments.interface
    _demand(re.fullmatch(r"[\w.@-]{0,15}", name) is not None, "--interface is the name of one "
            f"interface, like ib0, not {name!r}.")  # fmt: skip
    own = sys.executable if not (arguments.setup or arguments.container) else "python"
    return Job(
        script=script,
        arguments=tuple(arguments.arguments),
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        python=arguments.python or own,
        setup=tuple(arguments.setup),
        container=arguments.container,
        interface=arguments.interface,
        max_restarts=arguments.max_restarts,
        preflight_s=wait,
    )


def _script(name: str) -> str:
    """As it was typed, where it is there."""
    try:
        return name if Path(name).is_file() else find_script(name)
    except FileNotFoundError:
        raise ValueError(
            f"there is no script {name}; options of this command come before the script, the "
            "script's own after it."
        ) from None


def _demand(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def settings(job: Job) -> str:
    """Shell variables for the lines below."""
    words = " ".join(map(shlex.quote, [job.script, *job.arguments]))
    return f"""\
export NODES RANKS_PER_NODE={job.ranks_per_node} GPUS_PER_NODE={job.gpus_per_node}
export PYTHON={shlex.quote(job.python)}
export INTERFACE={shlex.quote(job.interface)}
command=({words})"""


PREFLIGHT = """\
# Looks at this node and, with the others, at the way between them: does every name resolve, does
# every node reach every other, do clocks, versions and the script agree, are node numbers
# distinct, are all GPUs and enough cores seen, is /dev/shm large enough? It ends by itself; where
# Python hangs, perhaps in reading from a shared folder, it is ended.
preflight() {{
    set -uo pipefail
    local code=0
    timeout --foreground --kill-after=5 {hung:g} "$PYTHON" -m labutils preflight --hosts "$HOSTS" \\
        --node-rank "${{NODE_RANK:-$SLURM_NODEID}}" \\
        --meet "$MASTER_ADDR:$MASTER_PORT" --gpus-per-node "$GPUS_PER_NODE" \\
        --ranks-per-node "$RANKS_PER_NODE" --interface "$INTERFACE" --token "$JOB" \\
        --timeout {seconds:g} --script "$1" || code=$?
    if [[ $code == 124 ]]; then
        echo "$(hostname) had not ended the preflight after {hung:g} s: Python hangs there," \\
            "perhaps in a folder that does not answer." >&2
    fi
    return "$code"
}}"""

TRAIN = """\
# One torchrun a node, which starts the node's ranks. (One torchrun a GPU would make ranks x ranks.)
train() {{
    set -euo pipefail
    local own address interface
    own=$("$PYTHON" -m labutils.cluster.address --towards "$MASTER_ADDR" --interface "$INTERFACE")
    read -r address interface <<<"$own"

    # gloo asks for the address of the host's own name, which may be loopback: name the interface.
    export GLOO_SOCKET_IFNAME="${{GLOO_SOCKET_IFNAME:-$interface}}"
    # NCCL starts over plain sockets, and stays with them where there is no InfiniBand; left alone
    # it may choose a bridge of Docker's. "=" means exactly this name, or eth1 would fit eth10 too.
    export NCCL_SOCKET_IFNAME="${{NCCL_SOCKET_IFNAME:-=$interface}}"
    # More to set, here or before submitting, when NCCL does not do what it should:
    #   NCCL_DEBUG=INFO       says which interfaces, rings and transports it chose
    #   NCCL_IB_HCA=mlx5_0    which InfiniBand adapters to use (default: all that are up)
    #   NCCL_IB_DISABLE=1     no InfiniBand: slow, but tells whether it is to blame
    #   NCCL_P2P_DISABLE=1    no direct copies between the node's GPUs: the same test for NVLink
    #   TORCH_DISTRIBUTED_DEBUG=DETAIL   names the collective in which ranks disagree
    # More threads than cores only wait for each other: the node's cores are shared out.
    local threads=$(($(nproc) / RANKS_PER_NODE))
    export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}}"
{own_store}
    # Node 0 hosts the rendezvous, and is told so: by itself torchrun compares host names, and may
    # not know its own. --local-addr is what the others are told, so loopback never is.
    # SIGUSR1 goes on to the ranks like SIGTERM: they have 30 s to write a checkpoint.
    local is_host=false
    [[ ${{NODE_RANK:-$SLURM_NODEID}} != 0 ]] || is_host=true
    exec "$PYTHON" -m torch.distributed.run \\
        --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE" --max-restarts={max_restarts} \\
        --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$JOB" \\
        --rdzv-conf="is_host=$is_host" --local-addr="$address" \\
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \\
        "$@"
}}"""


OWN_STORE = """
    # Ranks get a store of their own, not that of the agents' rendezvous: with torch 2.13, ranks
    # that start anew would read there the addresses of the killed ones, and often fail to connect.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
"""


def functions(job: Job) -> str:
    """The shell functions ``preflight SCRIPT`` and ``train SCRIPT ARGUMENTS``, for each node.

    They read NODES, NODE_RANK (or what srun sets), HOSTS, MASTER_ADDR, MASTER_PORT, JOB and what
    :func:`settings` sets.
    """
    own_store = OWN_STORE if job.max_restarts else ""
    parts = [TRAIN.format(max_restarts=job.max_restarts, own_store=own_store)]
    if job.preflight_s:
        hung = job.preflight_s + _HUNG_S
        parts.insert(0, PREFLIGHT.format(seconds=job.preflight_s, hung=hung))
    return "\n\n".join(parts)
