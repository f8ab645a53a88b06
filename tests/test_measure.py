"""``labutils measure-hardware``: the profile says what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from labutils.cli import main
from labutils.timing import profiles
from labutils.timing.contention import beside, load
from labutils.timing.cost import collective_seconds, kernel_seconds, wire_bytes
from labutils.timing.measure import REDUCE_BYTES, _all_reduce, measure
from labutils.timing.measured import report, toml
from labutils.timing.predict import predict
from labutils.timing.profiles import Profile
from labutils.virtual.record import Kernel

CURVE = [[1024, 200e-6], [65536, 300e-6], [1048576, 900e-6], [16777216, 9e-3]]
CPU: dict[str, Any] = {
    "kind": "cpu", "ranks": 4, "threads": 1, "date": "2026-01-01", "name": "CPU",
    "memory": 8 << 30, "processors": 1,
    "matmul": {"float32": [[64, 20e9], [512, 50e9], [1024, 40e9]]},
    "conv": [[8, 10e9], [32, 20e9], [64, 30e9]], "bandwidth": 8e9, "shortest": 3e-6,
    "to_device": {}, "all_reduce": CURVE, "busy": 6e-3,
}  # fmt: skip
GPU: dict[str, Any] = {
    **CPU, "kind": "cuda", "name": "Some GPU", "ranks": 1, "processors": 100, "all_reduce": [],
    "matmul": {"float32": [[64, 1e12], [4096, 18e12]], "float16": [[64, 1e12], [4096, 200e12]]},
    "conv": [[8, 1e12], [256, 9e12]], "bandwidth": 900e9,
    "to_device": {"pinned": 20e9, "pageable": 6e9, "latency": 9e-6},
}  # fmt: skip


def written(measured: dict[str, Any], folder: Path) -> Profile:
    path = folder / "my.toml"
    path.write_text(toml(measured), encoding="utf-8")
    return profiles.load(path)


def test_a_matrix_product_takes_as_long_as_measured(tmp_path: Path) -> None:
    n, profile = 512, written(CPU, tmp_path)
    nbytes = n * n * 4
    product = Kernel("mm", "gemm", "float32", 2 * n**3, 2 * nbytes, nbytes, ((n, n), (n, n)))
    assert kernel_seconds(product, profile) == pytest.approx(2 * n**3 / 40e9, rel=0.02)
    addition = Kernel("add", "elementwise", "float32", 0, 2 * nbytes, nbytes)
    assert kernel_seconds(addition, profile) == pytest.approx(3e-6 + 3 * nbytes / 8e9)


def test_an_all_reduce_takes_a_share_of_the_core(tmp_path: Path) -> None:
    """Of its 9 ms it works 6: a kernel beside it has a third of the core."""
    profile = written(CPU, tmp_path)
    nbytes, seconds = CURVE[-1]
    taken = load(wire_bytes("all_reduce", int(nbytes), 4), seconds, profile)
    assert taken.processors == pytest.approx(2 / 3, rel=1e-3)
    assert beside(profile, taken).gpu.peak["float32"] == pytest.approx(40e9 / 3, rel=1e-3)


@pytest.mark.parametrize(("nbytes", "seconds"), CURVE)
def test_an_all_reduce_takes_as_long_as_measured(
    nbytes: int, seconds: float, tmp_path: Path
) -> None:
    profile = written(CPU, tmp_path)
    assert collective_seconds("all_reduce", nbytes, 4, profile) == pytest.approx(seconds, rel=1e-3)


def test_a_gpu(tmp_path: Path) -> None:
    profile = written(GPU, tmp_path)
    assert profile.gpu.peak == {"float32": 18e12, "float16": 200e12}
    assert profile.gpu.tensor == ("float16",)
    assert (profile.bus.pinned, profile.bus.pageable, profile.bus.latency) == (20e9, 6e9, 9e-6)
    assert profile.gpus == 1 and profile.model.conv_efficiency == 0.5
    assert "pinned 20.0 GB/s" in report(GPU)


def test_a_prediction_on_the_measured_machine(tmp_path: Path) -> None:
    """At 40 GFLOP/s: three products per layer, two in the first; the rest is memory traffic."""
    written(CPU, tmp_path)
    prediction = predict("mlp", 64, gpus=4, profile=str(tmp_path / "my.toml"))
    weights = 784 * 512 + 512 * 512 + 512 * 10
    least = 2 * 64 * (3 * weights - 784 * 512) / 40e9
    assert least < prediction.step_s < 4 * least


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    words = ["measure-hardware", "--out", str(path), "--seconds", "0.001", "--ranks", "1"]
    assert main(words) == 0
    assert "memory" in capsys.readouterr().out
    profile = profiles.load(path)
    assert profile.gpus == 1 and 1e8 < profile.gpu.peak["float32"] < 1e15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "my.txt"], "ends in .toml"),
        (["--out", "/nowhere/my.toml"], "no folder '/nowhere'"),
        (["--out", "x.toml", "--ranks", "5000"], "ranks cannot be 5000"),
        (["--out", "x.toml", "--seconds", "0"], "seconds must be positive"),
    ],
)
def test_bad_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure-hardware", *words]) == 2
    assert message in capsys.readouterr().err


def test_other_programs_only_add_time(tmp_path: Path) -> None:
    """A curve that falls was measured beside something else; its profile would be refused."""

    class Busy:
        times = iter([9e-4, 2e-4, 5e-4, 3e-4, 3e-4, 9e-3, 8e-3, 1e-2])

        def together(self, function: object, calls: int) -> float:
            return next(self.times)

    curve = _all_reduce(torch.device("cpu"), Busy())  # type: ignore[arg-type]
    assert [nbytes for nbytes, _ in curve] == list(REDUCE_BYTES)
    assert [seconds for _, seconds in curve] == [2e-4, 2e-4, 3e-4, 3e-4, 3e-4, 8e-3, 8e-3, 1e-2]
    link = written({**CPU, "all_reduce": curve}, tmp_path).link
    assert link.curve[0] == (1024, 2e-4) and link.latency == pytest.approx(2e-4 / 6, rel=1e-3)


def test_ranks_reduce_together() -> None:
    measured = measure(ranks=1, seconds=0.001)
    assert measured["all_reduce"] == [] and measured["ranks"] == 1
