"""The training script: the same model however it is split up, saved, resumed and evaluated."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from labutils import launch
from labutils.inspection.start import run_script
from labutils.launch.run import Run

SCRIPT = Path(__file__).parent.parent / "labs/scripts/train_ddp.py"
EVALUATED = re.compile(r"test accuracy ([\d.]+)% \((\d+) of (\d+)\)")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo ranks on Unix")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As torchrun has it; on a busy machine more are slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(*arguments: object, ranks: int = 2, data: str = "fake") -> Run:
    run = run_script(str(SCRIPT), ["--data", data, *arguments], ranks=ranks, quick=True)
    if run.failure is not None:
        raise run.failure
    return run


def trained(path: Path, *arguments: object, ranks: int = 2) -> dict[str, Any]:
    """The checkpoint at the end of a training."""
    train("--checkpoint", path, *arguments, ranks=ranks)
    return torch.load(path, map_location="cpu")


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    momenta = [s["momentum_buffer"] for s in state["optimizer"]["state"].values()]
    return [*state["model"].values(), *momenta]


def assert_close(first: dict[str, Any], second: dict[str, Any]) -> None:
    for one, other in zip(tensors(first), tensors(second), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two epochs of the model without batch statistics, by one process in batches of 64."""
    path = tmp_path_factory.mktemp("whole") / "run.pt"
    return trained(path, "--model", "mlp", "--epochs", 2, "--batch-size", 64, ranks=1)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ["--batch-size", 32]),
        (4, ["--batch-size", 16]),
        (2, ["--batch-size", 8, "--accumulate", 4]),
        (2, ["--batch-size", 32, "--device", "vgpu"]),
    ],
)
def test_same_global_batch_same_model(
    whole: dict[str, Any], tmp_path: Path, ranks: int, more: list[Any]
) -> None:
    split = trained(tmp_path / "run.pt", "--model", "mlp", "--epochs", 2, *more, ranks=ranks)
    assert split["step"] == whole["step"] == 2 * 23  # 1,440 images in batches of 64: 22 and a half
    assert_close(split, whole)


def test_plain_loop_gives_the_same_model(whole: dict[str, Any]) -> None:
    """Without DDP, sampler, scaler or any function of the training: the textbook loop."""
    names = runpy.run_path(str(SCRIPT))
    (images, labels), _ = (s.tensors for s in names["load_data"]("fake"))
    torch.manual_seed(0)
    model = names["build_model"]("mlp", 16)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    for epoch in range(2):
        order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))
        for number, batch in enumerate(order.split(64)):
            done = epoch + 64 * (number + 1) / 1440
            cosine = 0.5 + 0.5 * torch.cos(torch.pi * torch.tensor(min(done - 1, 1.0))).item()
            optimizer.param_groups[0]["lr"] = 0.05 * (done if done < 1 else max(1e-3, cosine))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, whole["model"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_is_exact(tmp_path: Path, ranks: int) -> None:
    run = train("--max-steps", 12, "--checkpoint", tmp_path / "run.pt", ranks=ranks)
    _, correct, count = EVALUATED.findall(run.logs[0])[-1]
    assert "".join(run.logs[1:]) == ""
    names = runpy.run_path(str(SCRIPT))
    model = names["build_model"]("cnn", 16)
    model.load_state_dict(torch.load(tmp_path / "run.pt")["model"])
    images, labels = names["load_data"]("fake")[1].tensors
    with torch.no_grad():
        right = (model.eval()(images).argmax(1) == labels).sum().item()
    assert (int(correct), int(count)) == (right, 357)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two epochs with dropout, batch statistics and momentum, by two processes."""
    path = tmp_path_factory.mktemp("uninterrupted") / "run.pt"
    return trained(path, "--epochs", 2, "--save-every", 5)


@pytest.mark.parametrize("steps", [7, 23, 31], ids=["mid-epoch", "at its end", "second"])
def test_resumed_training_is_the_uninterrupted_one(
    uninterrupted: dict[str, Any], tmp_path: Path, steps: int
) -> None:
    """To the last bit."""
    path = tmp_path / "run.pt"
    train("--epochs", 2, "--checkpoint", path, "--max-steps", steps)
    assert torch.load(path)["step"] == steps
    resumed = trained(path, "--epochs", 2, "--resume")
    assert resumed["step"] == uninterrupted["step"]
    assert all(map(torch.equal, tensors(resumed), tensors(uninterrupted)))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(resumed["random"], uninterrupted["random"]))


@pytest.mark.parametrize(("ranks", "batch"), [(1, 64), (4, 16)])
def test_resume_with_another_number_of_ranks(
    whole: dict[str, Any], tmp_path: Path, ranks: int, batch: int
) -> None:
    path, common = tmp_path / "run.pt", ["--model", "mlp", "--epochs", 2]
    train(*common, "--checkpoint", path, "--max-steps", 10, ranks=2)
    run = train(
        *common, "--checkpoint", path, "--resume", "--batch-size", batch, ranks=ranks
    )  # fmt: skip
    assert "resumed at step 10, written by 2 ranks" in run.logs[0]
    assert_close(torch.load(path), whole)


def test_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """23 steps of 64 are an epoch; the checkpoint made there must say that it is over."""
    path, common = tmp_path / "run.pt", ["--model", "mlp", "--width", 1]
    train(*common, "--checkpoint", path, "--max-steps", 23)
    state = torch.load(path)
    assert (state["epoch"], state["samples"], state["step"]) == (1, 0, 23)
    torch.save({**state, "epoch": 0, "samples": 1440}, path)  # one that was not closed
    log = train(*common, "--checkpoint", path, "--resume", "--epochs", 2).logs[0]
    assert "resumed at step 23" in log
    assert [line.split(":")[0] for line in log.splitlines()[2:]] == ["epoch 2, step 46"]
    assert "loss 0.0000" not in log and " 0 samples/s" not in log
    log = train(*common, "--checkpoint", path, "--resume", "--epochs", 2).logs[0]
    assert log.splitlines()[-1] == "already finished: 2 epochs, 46 steps"


DAMAGED = {
    "step no number": {"step": "x"}, "negative samples": {"samples": -1},
    "no such epoch": {"epoch": float("inf")}, "no optimizer": {"optimizer": 7},
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["torn", "tensor", "other model", "no model", "no random state", *DAMAGED]
)
def test_checkpoint_that_cannot_be_resumed(tmp_path: Path, kind: str) -> None:
    path, common = tmp_path / "run.pt", ["--model", "mlp", "--width", 1, "--max-steps", 1]
    if kind == "other model":
        train(*common, "--checkpoint", path)
        common[3] = 2
    elif kind == "no random state":
        torch.save({k: v for k, v in trained(path, *common).items() if k != "random"}, path)
    elif kind in DAMAGED:
        torch.save({**trained(path, *common), **DAMAGED[kind]}, path)
    elif kind == "torn":
        path.write_bytes(b"half of it")
    else:
        torch.save({"weights": 1} if kind == "no model" else torch.ones(2), path)
    before = path.read_bytes()
    with pytest.raises(launch.RankFailure) as failure:
        train(*common, "--checkpoint", path, "--resume")
    assert f"{path} is damaged, or of another --model, --width" in str(failure.value)
    assert "Missing key" not in str(failure.value)
    assert path.read_bytes() == before


def test_checkpoint_that_cannot_be_written_is_found_out_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "run.pt", tmp_path / "file" / "run.pt", tmp_path):
        run = run_script(str(SCRIPT), ["--data", "fake", "--checkpoint", path], quick=True)
        assert f"--checkpoint {path}: " in str(run.failure)
        assert "epoch" not in run.logs[0]


def test_resume_where_there_is_nothing_yet(tmp_path: Path) -> None:
    run = train("--resume", "--checkpoint", tmp_path / "run.pt", "--max-steps", 1)
    assert "no checkpoint yet" in run.logs[0]
    assert torch.load(tmp_path / "run.pt")["step"] == 1


def _killed_while_it_writes(script: str, path: str) -> None:
    write = runpy.run_path(script)["write_atomically"]

    def half(state: Any, file: Any) -> None:
        file.write(b"half of it")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    write({"step": 2}, path)


def test_kill_during_the_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    runpy.run_path(str(SCRIPT))["write_atomically"]({"step": 1}, str(path))
    with pytest.raises(launch.RankFailure, match="SIGKILL"):
        launch.launch(_killed_while_it_writes, ranks=1, args=(str(SCRIPT), str(path)))
    assert torch.load(path) == {"step": 1}


def test_accumulation_reduces_once_a_step() -> None:
    run = train("--max-steps", 6, "--accumulate", 3, "--log-every", 2)
    buckets = [s for s in run.trace.spans if s.name.startswith("all_reduce of bucket")]
    assert len([s for s in buckets if s.device == "rank 0"]) == 6
    assert [line.split(":")[0] for line in run.logs[0].splitlines()[1:4]] == [
        "step 2", "step 4", "step 6",
    ]  # fmt: skip


def test_half_precision_scales_the_loss(tmp_path: Path) -> None:
    state = trained(tmp_path / "run.pt", "--amp", "fp16", "--model", "mlp", "--max-steps", 9)
    assert state["scaler"]["scale"] >= 1024
    assert all(t.isfinite().all() for t in tensors(state))


def test_sync_bn_needs_gpus_and_works_on_virtual_ones(tmp_path: Path) -> None:
    with pytest.raises(launch.RankFailure, match="SyncBatchNorm works on GPUs only"):
        train("--sync-bn")
    common = ("--max-steps", 6, "--sync-bn", "--device", "vgpu", "--width", 4)
    parts = trained(tmp_path / "parts.pt", *common, "--batch-size", 16, ranks=2)
    whole = trained(tmp_path / "whole.pt", *common, "--batch-size", 32, ranks=1)
    mean = "1.running_mean"  # before any dropout, which each rank draws for itself
    torch.testing.assert_close(parts["model"][mean], whole["model"][mean], rtol=1e-2, atol=1e-3)


def test_failure_on_one_rank_ends_all(tmp_path: Path) -> None:
    """A folder that vanishes during the training."""
    script = tmp_path / "vanish.py"
    script.write_text(
        f"import os, runpy\nnames = runpy.run_path({str(SCRIPT)!r})\n"
        "def gone(*_): raise FileNotFoundError('the folder is gone')\n"
        "names['Training'].save.__globals__['write_atomically'] = gone\n"
        "names['main'](['--data', 'fake', '--max-steps', '1', '--checkpoint', 'run.pt'])\n"
    )
    run = run_script(str(script), quick=True)
    assert "Rank 0 failed: FileNotFoundError" in str(run.failure)


def test_digits_under_torchrun(tmp_path: Path) -> None:
    """As a person types it, without the lab on the import path."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*command, str(SCRIPT), "--epochs", "3"], cwd=tmp_path, env=environment, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(EVALUATED.findall(done.stdout)[-1][0]) >= 95


def test_digits_alone(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    runpy.run_path(str(SCRIPT))["main"](["--epochs", "3"])
    torch.set_rng_state(state)
    assert not torch.distributed.is_initialized()
    assert float(EVALUATED.findall(capsys.readouterr().out)[-1][0]) >= 95


@pytest.mark.parametrize(
    "bad",
    [
        ["--epochs", "0"], ["--batch-size", "-1"], ["--model", "x"], ["--lr", "nan"],
        ["--lr", "-1"], ["--lr", "inf"], ["--warmup", "-1"], ["--workers", "-1"], ["--clip", "nan"],
        ["--resume"],
    ],
)  # fmt: skip
def test_impossible_arguments(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["main"](bad)
    assert bad[0] in capsys.readouterr().err
