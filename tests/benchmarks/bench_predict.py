"""How quickly ``lab.predict`` and ``lab.what_if`` answer, and how near the truth on this machine.

Run as a program it prints predicted beside measured: this machine is measured
(``labutils measure-hardware``), and two models are trained by real DistributedDataParallel over
gloo, one process per core with one thread each.  Noise of a shared machine enters twice, in the
profile and in the run; a factor of two between them is normal where other programs run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labutils import models
from labutils.timing.measure import measure as measure_hardware
from labutils.timing.measured import toml
from labutils.timing.predict import predict, scaling
from labutils.what_if_view import what_if

HERE = (("small_cnn", 32), ("resnet_small", 32))
"""Models that are predicted and measured on this machine, with the batch per rank."""
RANKS = min(2, len(os.sched_getaffinity(0)))
STEPS = 30
MOVES: tuple[dict[str, Any], ...] = (
    {"batch": 64}, {"gpus": 4}, {"nodes": 16}, {"fabric": "eth-10g"}, {"bucket_cap_mb": 5},
    {"precision": "tf32"}, {"batch": 128},
)  # fmt: skip


def measure() -> list[tuple[str, float, float]]:
    """Rows for ``python tests/benchmarks``."""
    dgx: dict[str, Any] = {"batch": 32, "profile": "DGX-1-V100"}
    predict("resnet50", gpus=1, **dgx)  # the recording
    large = seconds(lambda: predict("resnet50", gpus=8, nodes=128, **dgx))
    curve = seconds(lambda: scaling("resnet50", **dgx))
    view = what_if("resnet50", profile="DGX-1-V100")
    move(view, {})  # what is shown first
    moves = [there_and_back(view, change) for change in MOVES]
    rows = [
        ("predict resnet50 on 1,024 GPUs, s", large, 1.0),
        ("scaling curve 1 ... 1,024, s", curve, 3.0),
        ("slowest slider with its pictures, s", max(moves), 0.3),
    ]
    for name, predicted, measured in compare():
        factor = max(predicted / measured, measured / predicted)
        rows.append((f"{name} on {RANKS} gloo ranks: predicted against measured, x", factor, 2.5))
    return rows


def move(view: Any, change: dict[str, Any]) -> None:
    """What a slider does: answer, and draw the step (the scaling curve follows later)."""
    view.set(**change)
    for make in view._parts()[:2]:
        make()


def there_and_back(view: Any, change: dict[str, Any]) -> float:
    """Seconds of the quicker of two moves, since other programs run on the machine as well."""
    before = {name: view.asked[name] for name in change}
    return min(seconds(partial(move, view, one), 1) for one in (change, before, change))


def seconds(function: Callable[[], Any], calls: int = 2) -> float:
    """Seconds of one call, the best of ``calls``."""
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return min(found)


def compare() -> list[tuple[str, float, float]]:
    """(model, predicted, measured) seconds of a DDP step on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "here.toml")
        profile.write_text(toml(measure_hardware(RANKS, 0.2)), encoding="utf-8")
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(rank), folder]) for rank in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError("a rank of the measured run failed; its error is above.")
        measured = json.loads(Path(folder, "measured.json").read_text(encoding="utf-8"))
        return [
            (name, predict(name, batch, gpus=RANKS, profile=str(profile)).step_s, measured[name])
            for name, batch in HERE
        ]


def _train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/train"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    found = {name: _best_step(name, batch) for name, batch in HERE}
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _best_step(name: str, batch: int) -> float:
    spec = models.spec(name)
    model = DistributedDataParallel(spec.build())
    optimizer = spec.optimizer(model.parameters())
    inputs, targets = spec.batch(batch)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        spec.loss(model, inputs, targets).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return min(times)  # other programs only ever make a step longer


def show() -> None:
    """Print predicted beside measured."""
    print(f"{'model':<14} {'predicted':>10} {'measured':>10} {'error':>7}")
    for name, predicted, measured in compare():
        error = predicted / measured - 1
        print(f"{name:<14} {predicted * 1e3:>7.1f} ms {measured * 1e3:>7.1f} ms {error:>7.0%}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _train(int(sys.argv[1]), sys.argv[2])
    else:
        show()
