"""srun, scontrol and ssh for tests: they know what the job scripts use, and refuse the rest.

FAKE_CLUSTER names a file that maps each node to the command that leads into it.  Without it, srun
starts nothing: it writes its words and its environment to FAKE_LOG and prints FAKE_ANSWER.  With
FAKE_TIME_UP the job's time is up while it trains, and training ends with code 3.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time

NODE_LISTS = {
    "node[01-02]": "node01 node02",
    "node[001-003,7]": "node001 node002 node003 node7",
    "gnode[10,20,25,37]": "gnode10 gnode20 gnode25 gnode37",
    "rack[1-2]-node[01-02]": "rack1-node01 rack1-node02 rack2-node01 rack2-node02",
    "n[8-11],m[1,3]": "n8 n9 n10 n11 m1 m3",
    "nid[000008-000010]": "nid000008 nid000009 nid000010",
    "tux[1,3-4],lx[09-11]": "tux1 tux3 tux4 lx09 lx10 lx11",
    "host-1.cluster.edu,host-2.cluster.edu": "host-1.cluster.edu host-2.cluster.edu",
    "gpu12": "gpu12",
}
"""What ``scontrol show hostnames`` of Slurm 22.05 printed for these lists."""


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"] and len(words) == 3:
        print(NODE_LISTS[words[2]].replace(" ", "\n"))
        return 0
    if words[:1] == ["requeue"] and len(words) == 2:
        print(f"requeued {words[1]}")
        return 0
    sys.exit(f"scontrol: error: unexpected words {words}")


def srun(words: list[str]) -> int:
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("--nodelist")
    parser.add_argument("--kill-on-bad-exit", type=int, choices=[0])
    parser.add_argument("--wait", type=float, default=0)
    parser.add_argument("--export", choices=["ALL"])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    if "FAKE_CLUSTER" not in os.environ:
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps({"words": words, "environment": dict(os.environ)}) + "\n")
        if asked.nodelist:
            print(os.environ["FAKE_ANSWER"])
        if "FAKE_TIME_UP" in os.environ and "train" in asked.command:
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(60)
        return 0
    with open(os.environ["FAKE_CLUSTER"]) as file:
        enter = json.load(file)
    nodes = [asked.nodelist] if asked.nodelist else list(enter)[: asked.nodes]
    per_node = asked.ntasks // len(nodes)
    places = [(node, local) for node in range(len(nodes)) for local in range(per_node)]
    return step(nodes, places, enter, asked)


def step(nodes, places, enter, asked) -> int:  # type: ignore[no-untyped-def]
    """Start the tasks, pass SIGUSR1 on to them; ``--wait`` seconds after the first, all end."""
    tasks: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
    for number, (node, local) in enumerate(places):
        variables = {
            "SLURM_PROCID": number, "SLURM_NODEID": node, "SLURM_LOCALID": local,
            "SLURM_NTASKS": len(places), "SLURM_STEP_NUM_NODES": len(nodes),
            "SLURMD_NODENAME": nodes[node],
        }  # fmt: skip
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        tasks.append(subprocess.Popen([*enter[nodes[node]], *asked.command], env=environment))
    first_end = None
    while any(task.poll() is None for task in tasks):
        if any(task.returncode is not None for task in tasks):
            first_end = first_end or time.monotonic()
            if asked.wait and time.monotonic() > first_end + asked.wait:
                for task in tasks:
                    task.kill()
        time.sleep(0.02)
    for number, task in enumerate(tasks):
        if task.returncode:
            node = nodes[places[number][0]]
            text = f"srun: error: {node}: task {number}: Exited with exit code {task.returncode}"
            print(text, file=sys.stderr)
    return max(task.returncode % 256 for task in tasks)


def ssh(words: list[str]) -> int:
    options, (target, line) = words[:-2], words[-2:]
    if options != ["-T", "-o", "BatchMode=yes"]:
        sys.exit(f"ssh: unexpected options {options}")
    with open(os.environ["FAKE_CLUSTER"]) as file:
        enter = json.load(file)
    if target not in enter:
        print(f"ssh: Could not resolve hostname {target}: Name or service not known")
        return 255
    # As sshd does: a shell of the user, whose standard input ends with the connection, and whose
    # two outputs arrive in no certain order.
    line = f"exec 2> >(sleep 0.2; exec cat >&2)\n{line}"
    return os.execvp("ip", [*enter[target], "bash", "-c", line])


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol, "ssh": ssh}[sys.argv[1]](sys.argv[2:]))
