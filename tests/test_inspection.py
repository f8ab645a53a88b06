"""Bring your own script: no false alarm on right ones, and each mistake is found at its line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ddp_scripts import (
    ACCELERATE,
    BROKEN,
    CUDA,
    GOOD,
    GOOD_CHANGES,
    SPAWN,
    SPAWN_GOOD,
    Broken,
    changed,
)
from rank_helpers import alive, interrupt_after, wait_until

import labutils as lab
from labutils.inspection import bring_your_own
from labutils.inspection.report import Report
from labutils.launch.processes import fork_server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo ranks on Unix")

TRAIN = Path(__file__).parent.parent / "labs/scripts/train_ddp.py"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inspect(source: str, ranks: int = 2, nodes: int = 1, **more: Any) -> Report:
    Path("train.py").write_text(source)
    return bring_your_own("train.py", ranks, nodes=nodes, quick=True, **{"timeout": 30, **more})


def living() -> set[int]:
    """Processes below this one and its fork server."""
    fork_server()
    below = psutil.Process().children(recursive=True)
    return set(alive(*(process.pid for process in below)))


@pytest.mark.parametrize("name", GOOD_CHANGES)
def test_no_false_alarm(name: str) -> None:
    report = inspect(changed(GOOD_CHANGES[name]))
    assert report.ok, report.text()
    assert not report.remarks


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_false_alarm_on_a_loop_in_the_style_of_accelerate(ranks: int) -> None:
    report = inspect(ACCELERATE, ranks)
    assert report.ok, report.text()
    assert not report.remarks


@pytest.mark.parametrize(
    "arguments",
    [
        ["--checkpoint", "run.pt", "--save-every", 3],
        ["--accumulate", 3, "--amp", "fp16", "--model", "mlp"],
        ["--device", "vgpu", "--sync-bn", "--max-steps", 8, "--width", 4],
    ],
)
def test_no_false_alarm_on_the_training_script(arguments: list[object]) -> None:
    arguments = ["--data", "fake", "--epochs", 2, *arguments]
    report = bring_your_own(TRAIN, 2, arguments, quick=True)
    assert report.ok, report.text()
    assert not report.remarks


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_mistake_is_found_at_its_line(broken: Broken) -> None:
    report = inspect(broken.source(), broken.ranks, broken.nodes, timeout=broken.timeout)
    assert report.kinds == broken.kinds, report.text()
    assert broken.says in report.text().replace("\n     ", " "), report.text()
    first = min(report.findings, key=lambda finding: finding.kind)
    lines = broken.source().splitlines()
    if broken.line:
        number = int(re.search(r"line (\d+)", first.place)[1])  # type: ignore[index]
        assert broken.line in lines[number - 1], report.text()
        assert first.place.startswith("train.py, line ")


def test_script_that_insists_on_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    assert "virtual=True" in inspect(CUDA).findings[0].remedy
    report = inspect(CUDA, virtual=True)
    assert report.ok, report.text()
    assert "virtual A100" in report.logs[0]
    wrong = CUDA.replace('os.environ["LOCAL_RANK"]', 'os.environ["RANK"]')
    report = inspect(wrong, 1, 2, virtual=True)
    assert report.kinds == {"rank-for-local-rank"}
    assert report.findings[0].place.startswith("train.py, line 8")


def test_spawn_of_nothing() -> None:
    report = inspect(SPAWN)
    assert report.kinds == {"nothing-trained"}
    assert "device_count() is 0 here" in report.findings[0].evidence


def test_script_that_starts_its_own_processes() -> None:
    report = inspect(SPAWN_GOOD)
    assert report.ok, report.text()
    assert [row[1] for row in report.rows] == ["8", "8"]
    other = inspect(SPAWN_GOOD, ranks=3)
    assert other.kinds == {"failed"}
    assert "use bring_your_own(..., ranks=2)" in other.text()


def test_remarks_are_not_mistakes() -> None:
    source = changed({
        "model.state_dict()": "ddp.state_dict()",
        "        loss.backward()\n": "        loss.backward()\n        ddp(x).mean().backward()\n",
        "dist.barrier()\n": "test = TensorDataset(*(t[:7] for t in data.tensors))\n"
        "for x, y in DataLoader(test, 4, sampler=DistributedSampler(test, shuffle=False)):\n"
        "    model(x)\n",
    })  # fmt: skip
    report = inspect(source)
    assert report.ok, report.text()
    kinds = [remark.kind for remark in report.remarks]
    assert kinds == ["padded-evaluation", "accumulation-reduces", "module-prefix"]
    assert "counts 1 samples twice" in report.text()


def test_updates_by_hand_are_a_remark() -> None:
    source = changed({
        "ddp = DDP(model)": "ddp = model",
        "optimizer = torch.optim.SGD(ddp.parameters(), 0.1)\n": "",
        "        optimizer.zero_grad()\n": "        model.zero_grad()\n",
        "        optimizer.step()\n": "        for p in model.parameters():\n"
        "            dist.all_reduce(p.grad)\n"
        "            p.data -= 0.1 * p.grad / world\n",
    })  # fmt: skip
    report = inspect(source)
    assert report.ok, report.text()
    assert [remark.kind for remark in report.remarks] == ["no-optimizer"]
    assert "cannot be seen" in report.remarks[0].evidence


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("backend", ['"nccl"', 'backend="cpu:gloo,cuda:nccl"'])
def test_a_backend_that_was_replaced_is_named(backend: str) -> None:
    assert 'init_process_group("gloo")' in GOOD
    report = inspect(GOOD.replace('init_process_group("gloo")', f"init_process_group({backend})"))
    assert report.ok, report.text()
    (remark,) = report.remarks
    assert "gloo took the place of the backend" in remark.what and "nccl" in remark.what
    line = int(remark.where.rpartition(" ")[2])
    assert "init_process_group" in GOOD.splitlines()[line - 1]


def test_dataparallel_that_splits_nothing() -> None:
    source = "import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(2, 1))\n"
    report = inspect(source, ranks=1)
    (remark,) = report.remarks
    assert remark.kind == "splits-nothing"
    assert remark.place == "train.py, line 2, rank 0"
    assert "no GPU" in remark.what or "one GPU" in remark.what
    two = source.replace("1))", "1).to('vgpu'), device_ids=[0, 1])")
    two = "import labutils\nlabutils.virtual.enable(2)\n" + two
    assert not inspect(two, ranks=1).remarks


def test_time_limit_leaves_nothing_running_and_reports_what_was_seen() -> None:
    before = living()
    source = GOOD.replace("range(2)", "range(10**9)").replace("    sampler.set_epoch(epoch)\n", "")
    report = inspect(source, limit=4.0)
    assert report.kinds == {"no-set-epoch"}
    assert [remark.kind for remark in report.remarks] == ["stopped"]
    assert wait_until(lambda: living() <= before, 5)


def test_interrupt_leaves_nothing_running() -> None:
    before = living()
    with pytest.raises(KeyboardInterrupt), interrupt_after(2.0):
        inspect(GOOD.replace("range(2)", "range(10**9)"))
    assert wait_until(lambda: living() <= before, 5)


def test_killed_rank() -> None:
    report = inspect(GOOD.replace("sampler.set_epoch(epoch)", "os.kill(os.getpid(), 9 * rank)"))
    assert report.kinds == {"failed"}
    assert "Rank 1 died: it was ended by SIGKILL" in report.text()


def test_under_torchrun_as_text_and_html() -> None:
    Path("train.py").write_text(BROKEN[0].source())
    before = living()
    report = lab.bring_your_own("train.py", ranks=2)
    assert wait_until(lambda: living() <= before, 5)
    assert report.kinds == {"no-sampler"}
    text = report.text()
    assert text.startswith("train.py on 2 ranks: 1 mistake\n")
    assert "train.py, line 16, ranks 0 and 1: loader = DataLoader(data, 8, shuffle=True)" in text
    assert "ms per step (median)" in text
    rich = report._repr_html_()
    assert "<b>Mistake: Ranks 0 and 1 read the same training samples</b>" in rich
    assert rich.count("<tr>") == 3
    assert "<script" not in rich


def test_html_is_escaped() -> None:
    report = inspect(GOOD.replace("ddp = DDP(model)", "raise ValueError('<b>&')"))
    assert report.kinds == {"failed"}
    assert "&lt;b&gt;&amp;" in report._repr_html_()
    assert "<b>&" not in report._repr_html_()


def test_impossible_requests() -> None:
    with pytest.raises(FileNotFoundError, match="no script 'nowhere.py'"):
        bring_your_own("nowhere.py")
    Path("train.py").write_text(GOOD)
    with pytest.raises(ValueError, match="ranks=0"):
        bring_your_own("train.py", 0)
    with pytest.raises(ValueError, match="limit"):
        bring_your_own("train.py", limit=0)
    with pytest.raises(ValueError, match="args"):
        bring_your_own("train.py", args="--lr 1")
