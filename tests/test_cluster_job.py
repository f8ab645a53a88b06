"""Jobs on several nodes: what is written, and whether it runs on nodes that are namespaces here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labutils.cli import main
from labutils.cluster import address
from labutils.cluster import job as jobs
from labutils.cluster.hostlist import expand
from labutils.launch.forked import OWN_STORE
from tests import fake_cluster, fake_programs
from tests.fake_cluster import Cluster

ROOT = Path(__file__).resolve().parents[1]
TWO_NODES = ["--nodes", "2", "--gpus-per-node", "1"]
TRAINING = """
import os, signal, socket, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
words = [socket.gethostname(), dist.get_rank(), os.environ["LOCAL_RANK"], dist.get_world_size(),
         total.item(), os.environ["MASTER_ADDR"], sys.argv[1:]]
os.write(1, " ".join(map(str, ["ran:", *words])).encode() + b"\\n")  # whole lines
dist.barrier()
dist.destroy_process_group()
"""
FAILING_ONCE = """
import pathlib, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
mark = pathlib.Path("failed")
if dist.get_rank() == 1 and not mark.exists():
    mark.touch()
    sys.exit(7)
dist.barrier()
dist.destroy_process_group()
"""
SAVING = """
import os, signal, sys, time
def say(what):
    os.write(1, f"rank {os.environ['RANK']} {what}\\n".encode())
def save(*signal):
    say("saves")
    sys.exit(3)
signal.signal(signal.SIGUSR1, save)
say("trains")
time.sleep(60)
"""

ENVIRONMENTS = {
    "two nodes": {
        "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_NODELIST": "node[01-02]",
        "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "32(x2)",
        "SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1,2,3",
        "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_CLUSTER_NAME": "gpus", "SLURMD_NODENAME": "node01", "SLURM_CPUS_PER_TASK": "32",
    },
    "four nodes, restarted": {
        "SLURM_JOB_ID": "200505", "SLURM_JOB_NUM_NODES": "4", "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_NODELIST": "gnode[10,20,25,37]", "SLURM_TASKS_PER_NODE": "1(x4)",
        "SLURM_JOB_CPUS_PER_NODE": "4(x4)", "SLURM_NODEID": "0", "SLURM_PROCID": "0",
        "SLURM_MEM_PER_CPU": "4", "SLURM_JOB_QOS": "sub", "SLURM_NODE_ALIASES": "(null)",
    },
    "an array": {
        "SLURM_JOB_ID": "90001", "SLURM_ARRAY_JOB_ID": "89999", "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_JOB_NUM_NODES": "6", "SLURM_JOB_NODELIST": "n[8-11],m[1,3]",
        "SLURM_TASKS_PER_NODE": "1(x6)", "SLURM_JOB_CPUS_PER_NODE": "72(x2),36(x4)",
    },
    "one node": {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu12",
        "SLURM_TASKS_PER_NODE": "1",
    },
}  # fmt: skip
"""Environments of batch scripts, with the names and forms of Slurm's manual."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert list(fake_cluster.left_over()) == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_job(*words: str, nodes: int = 2) -> Path:
    assert main(["slurm", "--nodes", str(nodes), *words]) == 0
    return Path("training.sbatch")


def submit(cluster: Cluster, script: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What sbatch does: run the script on the first node of the job."""
    variables = {**ENVIRONMENTS["two nodes"], "PYTHONPATH": str(ROOT), **more}
    command = [*cluster.enter("node01", Path.cwd()), "bash", str(script)]
    return subprocess.run(
        command, env=cluster.environment(**variables), capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(("text", "names"), fake_programs.NODE_LISTS.items())
def test_node_lists_are_read_as_slurm_reads_them(text: str, names: str) -> None:
    assert expand(text) == names.split()


@pytest.mark.parametrize("text", ["", "a,", "n[1-", "n[a]", "n[3-1]", "n[]"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of nodes"):
        expand(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "n[1-999][1-999]", "n[1-60000],m[1-60000]"])
def test_a_digit_too_many(text: str) -> None:
    with pytest.raises(ValueError, match="names more than 100,000 nodes"):
        expand(text)


def submit_nowhere(script: Path, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script with an srun that starts nothing, and writes to the file "log"."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for program in ("srun", "scontrol"):
        fake_cluster.write_program(programs / program)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}", "FAKE_LOG": str(folder / "log"),
        "FAKE_ANSWER": "10.1.2.3 23456", **more,
    }  # fmt: skip
    return subprocess.run(["bash", script], env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_script_in_real_environments(name: str, folder: Path) -> None:
    environment = ENVIRONMENTS[name]
    nodes = int(environment["SLURM_JOB_NUM_NODES"])
    script = write_job(
        "--gpus-per-node", "4", "training.py", "--epochs", "3", "two words", nodes=nodes
    )
    done = submit_nowhere(script, folder, **environment)
    assert done.returncode == 0, done.stderr
    names = fake_programs.NODE_LISTS[environment["SLURM_JOB_NODELIST"]].split()
    assert f"nodes: {' '.join(names)}; they meet at 10.1.2.3:23456" in done.stdout
    meet, preflight, train = (
        json.loads(line) for line in (folder / "log").read_text().splitlines()
    )
    assert meet["words"][:3] == ["--nodes=1", "--ntasks=1", f"--nodelist={names[0]}"]
    assert meet["words"][-4:-2] == ["--seed", environment["SLURM_JOB_ID"]]
    for step in (preflight, train):
        told = step["environment"]
        assert step["words"][:3] == [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        assert told["HOSTS"] == ",".join(names)
        assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("10.1.2.3", "23456")
        restarts = environment.get("SLURM_RESTART_COUNT", "0")
        assert told["JOB"] == f"{environment['SLURM_JOB_ID']}-{restarts}"
        assert told.get("SRUN_CPUS_PER_TASK") == environment.get("SLURM_CPUS_PER_TASK")
    assert preflight["words"][-2:] == ["preflight", "training.py"]
    assert train["words"][-5:] == ["train", "training.py", "--epochs", "3", "two words"]


def directives(script: Path) -> set[str]:
    """What sbatch reads: the directives in front of the first command, without their quotes."""
    read: list[str] = []
    for line in script.read_text().splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            read += shlex.split(line.removeprefix("#SBATCH "), comments=True)
    return set(read)


def test_what_sbatch_reads(folder: Path) -> None:
    script = write_job(
        "--gpus-per-node", "4", "--time", "2-00", "--partition", "gpu", "--mem", "64G", "--requeue",
        "--sbatch=--constraint=a100", "--signal-before", "300", "--setup", "module load cuda",
        "--container", "apptainer exec --nv image.sif", "training.py",
    )  # fmt: skip
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert directives(script) == {
        "--job-name=training", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4",
        "--time=2-00", "--partition=gpu", "--mem=64G", "--constraint=a100", "--requeue",
        "--signal=B:USR1@300", "--open-mode=append", "--output=%x-%j.out", f"--chdir={Path.cwd()}",
        "--cpus-per-task=16",
    }  # fmt: skip
    assert "module load cuda" in lines
    assert sum("apptainer exec --nv image.sif " in line for line in lines) == 2
    assert "export NODES RANKS_PER_NODE=4 GPUS_PER_NODE=4" in lines
    assert "export PYTHON=python" in lines, "the environment's own, where one is activated"


def test_cores_are_asked_for(folder: Path) -> None:
    script = write_job("--ranks-per-node", "3", "training.py")
    assert "--cpus-per-task=12" in directives(script)
    assert "for its 3 ranks together: 4 a rank unless --cpus-per-task is" in script.read_text()
    script = write_job("--ranks-per-node", "3", "--cpus-per-task", "5", "--force", "training.py")
    assert "--cpus-per-task=5" in directives(script)


def test_names_with_blanks_reach_sbatch_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = folder / """w s#1 "q" it's \\"""
    odd.mkdir()
    monkeypatch.chdir(odd)
    Path("my train.py").write_text("")
    words = ["--ranks-per-node", "1", "--sbatch=--comment=so it goes", "my train.py", "two\nlines"]
    write_job(*words)
    read = directives(Path("my train.sbatch"))
    assert {"--job-name=my train", f"--chdir={odd}", "--comment=so it goes"} <= read
    assert "# Submit this with: sbatch 'my train.sbatch'\n" in Path("my train.sbatch").read_text()


def test_ranks_that_start_anew_have_a_store_of_their_own(folder: Path) -> None:
    (line,) = (f"    export {name}={value}\n" for name, value in OWN_STORE.items())
    words = ["--ranks-per-node", "1", "--force"]
    assert line not in write_job(*words, "training.py").read_text()
    assert line in write_job(*words, "--max-restarts", "1", "training.py").read_text()


def test_a_job_is_queued_again_only_so_often(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ranks-per-node", "1", "--requeue", "--max-requeues", "3", "--force", "training.py"]
    script = write_job(*words, "--resume")
    assert capsys.readouterr().err == ""
    told = {**ENVIRONMENTS["two nodes"], "FAKE_TIME_UP": "1"}
    done = submit_nowhere(script, folder, **told, SLURM_RESTART_COUNT="2")
    assert done.stdout.endswith("requeued 123456\n")
    done = submit_nowhere(script, folder, **told, SLURM_RESTART_COUNT="3")
    assert "requeued" not in done.stdout
    assert "not queued once more (--max-requeues 3)" in done.stderr
    assert done.returncode == 3
    write_job(*words)
    assert 'no argument of it says "resume"' in capsys.readouterr().err


def test_a_node_where_python_hangs_ends_its_preflight(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_HUNG_S", 0.5)
    hangs = folder / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    script = write_job("--ranks-per-node", "1", "--preflight-timeout", "0.5", "training.py")
    text = script.read_text()
    function = text[text.index("preflight() {") : text.index("# One torchrun a node,")]
    used = set(re.findall(r"\$\{?([A-Z_]+)", function))
    variables = dict.fromkeys(used, "1") | {"PYTHON": str(hangs)}
    done = subprocess.run(
        ["bash", "-c", f"{function}\npreflight training.py"],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 124
    name = socket.gethostname()
    assert f"{name} had not ended the preflight after 1 s: Python hangs there" in done.stderr


@pytest.mark.parametrize(
    "options", [[], ["--requeue", "--setup", "true"], ["--preflight-timeout=0"]]
)
def test_the_script_is_good_bash(folder: Path, options: list[str]) -> None:
    script = write_job("--gpus-per-node", "1", *options, "training.py", "it's")
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "0", "--gpus-per-node", "1", "training.py"], "--nodes must be at least 1"),
        (["--nodes", "2", "training.py"], "say how many ranks a node runs"),
        (["--nodes", "2", "--gpus-per-node", "-1", "training.py"], "must not be negative"),
        (["--nodes", "2", "--gpus-per-node", "2", "--ranks-per-node", "4", "training.py"],
         "4 ranks cannot share 2 GPUs a node"),
        ([*TWO_NODES, "trian.py"], "there is no script trian.py"),
        ([*TWO_NODES, "--time", "soon", "training.py"], "--time takes"),
        ([*TWO_NODES, "--sbatch", "mem=4", "training.py"],
         "--sbatch takes one option"),
        ([*TWO_NODES, "--sbatch=--nodes=3", "training.py"],
         "--sbatch=--nodes=3 would contradict the script: use --nodes of this command"),
        ([*TWO_NODES, "--sbatch=-n 4", "training.py"],
         "--sbatch=-n 4 would contradict the script: it is one task a node"),
        ([*TWO_NODES, "--time", "2:00", "training.py"],
         "--time 2:00 is over before SIGUSR1 could come, 120 s before its end"),
        ([*TWO_NODES, "--interface", "ib0 ib1", "training.py"],
         "--interface is the name of one interface"),
        ([*TWO_NODES, "--preflight-timeout", "inf", "training.py"],
         "--preflight-timeout is 0 or more seconds, not inf"),
        ([*TWO_NODES, "--preflight-timeout", "3600", "training.py"],
         "--time 01:00:00 may be over before the preflight is, which waits 3600 s"),
        ([*TWO_NODES, "--cpus-per-task", "-3", "training.py"],
         "--cpus-per-task must be at least 1, not -3"),
        ([*TWO_NODES, "--max-requeues", "0", "training.py"],
         "--max-requeues must be at least 1"),
        ([*TWO_NODES, "--mem", "banana", "training.py"],
         "--mem takes a whole number"),
        ([*TWO_NODES, "--mem", "1.5G", "training.py"],
         "--mem takes a whole number"),
        ([*TWO_NODES, "--sbatch=--ntasks-per-gpu=1", "training.py"],
         "would contradict the script: it is one task a node"),
        ([*TWO_NODES, "--sbatch=--array=0-9", "training.py"],
         "would contradict the script: a job of several nodes cannot be an array here"),
        ([*TWO_NODES, "--sbatch=-a0-9", "training.py"],
         "would contradict the script: a job of several nodes cannot be an array here"),
        ([*TWO_NODES, "--sbatch=--chdir=/", "training.py"],
         "would contradict the script: the script sets it itself, to this folder"),
        ([*TWO_NODES, "--sbatch=--job-name=x", "training.py"],
         "would contradict the script: the script sets it itself, to the training script's name"),
        ([*TWO_NODES, "--out", "no/where", "training.py"],
         "no/where cannot be written"),
    ],
)  # fmt: skip
def test_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["slurm", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert list(folder.glob("*.sbatch")) == []


def test_a_script_that_was_edited_is_not_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["slurm", *TWO_NODES]
    Path("training.sbatch").write_text("mine")
    assert main([*words, "training.py"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path("training.sbatch").read_text() == "mine"
    assert main([*words, "--out", "-", "training.py"]) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash\n")
    assert main([*words, "--force", "training.py"]) == 0
    assert Path("training.sbatch").read_text() != "mine"


def test_the_job_runs_on_two_nodes(folder: Path) -> None:
    script = write_job("--ranks-per-node", "1", "training.py", "two words")
    with Cluster(folder) as cluster:
        done = submit(cluster, script)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "node01 resolves to 10.77.0.1" in done.stderr
        assert "2 nodes are ready." in done.stdout
        ran = sorted(line for line in done.stdout.splitlines() if line.startswith("ran:"))
        assert ran == [
            "ran: node01 0 0 2 1 10.77.0.1 ['two words']",
            "ran: node02 1 0 2 1 10.77.0.1 ['two words']",
        ]
        assert cluster.processes() == []


def test_ranks_start_anew_on_two_nodes(folder: Path) -> None:
    Path("training.py").write_text(FAILING_ONCE)
    words = ["--ranks-per-node", "1", "--max-restarts", "1", "--preflight-timeout", "0"]
    script = write_job(*words, "training.py")
    with Cluster(folder) as cluster:
        done = submit(cluster, script)  # for ever, if ranks read old keys of a store
        assert done.returncode == 0, done.stdout + done.stderr
        assert Path("failed").exists()
        assert cluster.processes() == []


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("mount -t tmpfs -o size=16m tmpfs /dev/shm", "node02  has 16 MiB of /dev/shm"),
        ("ip link set eth0 down", "node02  did not come to the meeting"),
        (
            "ip link set eth0 name eth7; ip link set eth7 up",
            "node02  node02 has no IPv4 address on",
        ),
    ],
)
def test_the_preflight_names_the_broken_node(folder: Path, broken: str, sentence: str) -> None:
    wait = "8" if "down" in broken else "120"
    words = ["--interface", "eth0"] if "eth7" in broken else []
    script = write_job("--ranks-per-node", "1", "--preflight-timeout", wait, *words, "training.py")
    with Cluster(folder, broken={"node02": broken}) as cluster:
        done = submit(cluster, script)
        shown = done.stdout + done.stderr
        assert done.returncode == 1, shown
        assert sentence in done.stdout, shown
        assert "training was not started" in done.stderr
        assert "ran:" not in shown
        assert cluster.processes() == []


def test_when_the_time_is_up_every_rank_saves_and_the_job_is_queued_again(folder: Path) -> None:
    Path("training.py").write_text(SAVING)
    script = write_job("--ranks-per-node", "1", "--preflight-timeout=0", "--requeue", "training.py")
    with Cluster(folder) as cluster:
        variables = {**ENVIRONMENTS["two nodes"], "PYTHONPATH": str(ROOT)}
        job = subprocess.Popen(
            [*cluster.enter("node01", folder), "bash", str(script)],
            env=cluster.environment(**variables), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert job.stdout is not None
        lines = []
        while sum("trains" in line for line in lines) < 2:
            lines.append(job.stdout.readline())
            assert lines[-1], f"it ended too early: {lines}"
        job.send_signal(signal.SIGUSR1)
        rest = job.communicate(timeout=120)[0]
        assert "rank 0 saves" in rest
        assert "rank 1 saves" in rest
        assert rest.endswith("go on from the checkpoint.\nrequeued 123456\n")
        assert job.returncode != 0
        assert cluster.processes() == []


def test_two_tasks_on_a_node_are_found_out(folder: Path) -> None:
    script = write_job("--ranks-per-node", "1", "training.py")
    text = script.read_text().replace('--ntasks="$NODES" --ntasks-per-node=1', "--ntasks=4")
    script.write_text(text)
    with Cluster(folder) as cluster:
        done = submit(cluster, script)
        assert done.returncode == 1
        for node in cluster.nodes:
            assert f"{node} runs more than one task: start one task a node" in done.stderr


def test_without_slurm_over_ssh(folder: Path) -> None:
    words = ["ssh", "--hosts", "node[01-02]", "--ranks-per-node", "1", "training.py", "x"]
    with Cluster(folder) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", "labutils", *words],
            env=cluster.environment(PYTHONPATH=str(ROOT)),
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[node02] ran: node02 1 0 2 1 10.77.0.1 ['x']" in done.stdout
        assert cluster.processes() == []


def test_nothing_stays_when_ssh_is_killed(folder: Path) -> None:
    Path("training.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    words = ["ssh", "--hosts", "node01,node02", "--ranks-per-node", "1", "--preflight-timeout", "0"]
    with Cluster(folder) as cluster:
        command = [sys.executable, "-u", "-m", "labutils", *words, "training.py"]
        job = subprocess.Popen(
            command,
            env=cluster.environment(PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert job.stdout is not None
        seen = 0
        while seen < 2:
            line = job.stdout.readline()
            assert line, "it ended before both nodes were training"
            seen += "here" in line
        assert len(cluster.processes()) >= 6  # guard, torchrun and rank on each node
        job.send_signal(signal.SIGKILL)
        job.wait()
        deadline = time.monotonic() + 2
        while cluster.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert cluster.processes() == []
        job.stdout.close()


def test_ssh_that_cannot_connect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks-per-node", "1", "training.py"]
    with Cluster(folder) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", "labutils", "ssh", "--hosts", "nowhere,node02", *words],
            env=cluster.environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert "[nowhere] ssh: Could not resolve hostname nowhere" in done.stdout
    assert main(["ssh", "--hosts", "a,me@a", *words]) == 2
    assert "names a machine twice" in capsys.readouterr().err


def test_ports_come_from_the_job_and_avoid_what_is_taken() -> None:
    first = address.free_port(123456)
    assert 20_000 <= first < 30_000
    assert first == address.free_port(123456)
    with socket.create_server(("", first)):
        assert address.free_port(123456) == first + 1
    assert address.free_port(9_999) >= 20_000


def test_loopback_is_no_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"10.0.0.7": "eth0", "192.168.3.7": "ib0"}
    monkeypatch.setattr(address, "own_addresses", lambda: own)
    monkeypatch.setattr(address, "resolve", lambda name: ["127.0.1.1"])
    monkeypatch.setattr(address, "towards", lambda other: ("192.168.3.7", "ib0"))
    assert address.meeting_address("node7") == "192.168.3.7"
    assert address.meeting_address("node7", "eth0") == "10.0.0.7"
    with pytest.raises(ValueError, match="no IPv4 address on interface 'eth9'; it has: eth0"):
        address.meeting_address("node7", "eth9")
    monkeypatch.setattr(address, "resolve", lambda name: ["127.0.1.1", "10.0.0.7"])
    assert address.meeting_address("node7") == "10.0.0.7"
    own.clear()
    with pytest.raises(ValueError, match="no address but loopback"):
        address.meeting_address("node7")
