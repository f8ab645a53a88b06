"""The training script when it is to end early, finds too few GPUs, or cannot write."""

from __future__ import annotations

import errno
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_train_ddp import SCRIPT, tensors, trained

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGUSR1, gloo ranks on Unix")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCHRUN += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]  # as job scripts have it
TRAINING = [str(SCRIPT), "--data", "fake", "--epochs", "999", "--log-every", "1"]


def ended_early(launcher: list[str], *arguments: object, only: str = "") -> tuple[int, str]:
    """Exit code and output of a training that gets SIGUSR1 after three steps.

    The signal goes to what was started, or to one rank ``only``.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, *launcher, *TRAINING, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        next(line for line in process.stdout if line.startswith("step 3:"))
        ranks = psutil.Process(process.pid).children()
        (target,) = [r.pid for r in ranks if r.environ().get("RANK") == only] or [process.pid]
        os.kill(target, signal.SIGUSR1)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out


@pytest.mark.parametrize("only", ["", "1"], ids=["torchrun", "one rank"])
def test_signal_saves_and_ends_all_ranks(tmp_path: Path, only: str) -> None:
    path = tmp_path / "run.pt"
    code, out = ended_early(TORCHRUN, "--checkpoint", path, only=only)
    assert code not in (0, -signal.SIGUSR1)  # so the job script puts the job back into the queue
    state = torch.load(path)
    assert out.splitlines()[-1] == f"ended by SIGUSR1 after step {state['step']}, saved"
    if not only:
        same = trained(tmp_path / "same.pt", "--epochs", 999, "--max-steps", state["step"])
        assert all(map(torch.equal, tensors(state), tensors(same)))


def test_signal_to_a_single_process_without_a_checkpoint() -> None:
    code, out = ended_early([])
    assert code == 128 + signal.SIGUSR1
    assert out.splitlines()[-1].startswith("ended by SIGUSR1 after step ")
    assert "saved" not in out


def test_too_few_gpus_are_never_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs for eight processes: an error, not eight slow processes on CPUs."""
    join_group = runpy.run_path(str(SCRIPT))["join_group"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert join_group("auto").type == "cpu"  # in the lab, which has more ranks than GPUs
    torch.distributed.destroy_process_group()
    monkeypatch.setitem(join_group.__globals__, "LAB", None)
    for kind in ("auto", "cuda"):
        with pytest.raises(SystemExit, match="8 processes on this node, but 4 GPUs"):
            join_group(kind)


def test_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "run.pt", runpy.run_path(str(SCRIPT))["write_atomically"]
    write({"step": 1}, str(path))

    def full(_: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match=f"--checkpoint {path} cannot be written: .*No space left"):
        write({"step": 2}, str(path))
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_full_disk_ends_the_training_with_a_sentence(tmp_path: Path) -> None:
    """Stood in for by a limit on the size of a file, which the checkpoint exceeds."""
    command = [sys.executable, str(SCRIPT), "--data", "fake", "--epochs", "1", "--checkpoint"]
    path = tmp_path / "run.pt"
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 8 && exec "$@"', "bash", *command, str(path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stderr.strip() == f"--checkpoint {path} cannot be written: [Errno 27] File too large"
    )
    assert list(tmp_path.iterdir()) == []
