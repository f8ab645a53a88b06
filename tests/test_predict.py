"""``lab.predict`` against closed forms, real runs on virtual GPUs, and its own promises."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from labutils import virtual
from labutils.cli import main
from labutils.models import spec
from labutils.timing import ddp, library, profiles, published, scaled
from labutils.timing.cost import collective_seconds
from labutils.timing.play import union
from labutils.timing.predict import Prediction, Question, predict, scaling
from labutils.virtual.record import Collective, Entry, Recorder
from labutils.virtual.state import state

DGX = "DGX-1-V100"


class Tower(nn.Module):
    """Eight square layers: 8 x 512 x 512 weights, no biases."""

    def __init__(self, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def big(**size: int) -> Tower:
    """A tower without values, which costs nothing to make."""
    with torch.device("meta"):
        return Tower(**size)


TOWER = Tower()
EXAMPLE = torch.zeros(2, 512), torch.zeros(2, dtype=torch.int64)
WEIGHTS = 8 * 512 * 512 * 4


def tower(**asked: Any) -> Prediction:
    return predict(TOWER, **{"example": EXAMPLE, "profile": DGX, "batch": 64, **asked})


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


# ------------------------------------------------------------------------------------------ memory


def test_memory_by_category() -> None:
    """Adam keeps two numbers a parameter, and a step count on the host; DDP one more."""
    memory = tower(optimizer=adam, gpus=2).memory_bytes
    assert memory["parameters"] == memory["buckets"] == WEIGHTS
    assert memory["optimizer"] == 2 * WEIGHTS
    assert memory["peak"] == sum(v for k, v in memory.items() if k != "peak")


def test_gradients_may_lie_in_the_buckets() -> None:
    """At the end of backward all gradients are there; as views they take nothing."""
    own, views = (tower(gpus=2, gradient_as_bucket_view=v).memory_bytes for v in (False, True))
    assert own["gradients"] == WEIGHTS and views["gradients"] == 0
    assert own["peak"] - views["peak"] > 0.8 * WEIGHTS


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_halves_what_lasts(precision: str) -> None:
    memory = tower(gpus=2, precision=precision, optimizer=adam).memory_bytes
    assert memory["parameters"] == memory["buckets"] == WEIGHTS // 2
    assert memory["optimizer"] == WEIGHTS


def test_the_peak_is_that_of_a_run_on_a_virtual_gpu() -> None:
    """The same program by hand, on the user's own phantom GPU."""
    chosen = spec("resnet18")
    virtual.enable(1, compute="phantom")
    gc.collect()
    torch.vgpu.reset_peak_memory_stats(0)  # type: ignore[attr-defined]
    base = torch.vgpu.memory_allocated(0)  # type: ignore[attr-defined]
    model = chosen.build().to("vgpu:0")
    optimizer = chosen.optimizer(model.parameters())
    (images,), labels = chosen.batch(8)
    for _ in range(3):
        x, y = images.to("vgpu:0"), labels.to("vgpu:0")
        optimizer.zero_grad()
        chosen.loss(model, (x,), y).backward()
        optimizer.step()
    peak = torch.vgpu.max_memory_allocated(0) - base  # type: ignore[attr-defined]
    virtual.disable()
    assert predict("resnet18", 8, "single").memory_bytes["peak"] == peak


def test_what_does_not_fit_is_said_by_category() -> None:
    prediction = predict("resnet50", 256, "single", profile="V100-SXM2")
    assert not prediction.fits
    assert prediction.notes[0].startswith("Out of memory: each GPU would hold 20.")
    for word in ("parameters", "activations", "V100-SXM2 has 15.78 GiB"):
        assert word in prediction.notes[0]
    assert predict("resnet50", 128, "single", profile="V100-SXM2").fits


# -------------------------------------------------------------------------------------------- time


def test_collectives_take_what_they_cost_over_all_ranks() -> None:
    prediction = tower(gpus=8, nodes=4, fabric="eth-10g", bucket_cap_mb=2)
    spans = [s for s in prediction.trace.spans if s.name == "all_reduce"]
    profile = profiles.load(DGX, "eth-10g")
    assert [s.bytes for s in sorted(spans, key=lambda s: s.start)] == prediction.buckets
    assert sum(prediction.buckets) == WEIGHTS
    for span in spans:
        expected = collective_seconds("all_reduce", span.bytes, 32, profile, 4)
        assert span.duration == pytest.approx(expected, abs=2e-9)


def test_a_slow_network_is_exposed() -> None:
    """All reductions follow one another; hardly any of them overlaps with computing."""
    prediction = tower(gpus=8, nodes=4, fabric="eth-10g")
    spent = sum(s.duration for s in prediction.trace.spans if s.name == "all_reduce")
    assert 0.9 * spent < prediction.exposed_communication_s <= spent
    alone = tower(strategy="single")
    assert prediction.step_s > spent + 0.3 * alone.step_s
    assert alone.exposed_communication_s == 0


def test_speed_and_efficiency() -> None:
    one, many = tower(strategy="single"), tower(gpus=8, nodes=2)
    assert one.efficiency == 1 and one.samples_per_s == pytest.approx(64 / one.step_s)
    assert many.samples_per_s == pytest.approx(16 * 64 / many.step_s)
    assert many.efficiency == pytest.approx(many.samples_per_s / 16 / one.samples_per_s)


def test_passes_under_no_sync_reduce_once() -> None:
    predictions = [tower(gpus=8, accumulate=n, batch=4096) for n in (1, 2, 3, 4, 5)]
    for prediction in predictions:
        names = [s.name for s in prediction.trace.spans]
        assert names.count("all_reduce") == len(prediction.buckets)
    lengths = [p.step_s for p in predictions]
    more = [b - a for a, b in itertools.pairwise(lengths)]
    assert more[1:] == pytest.approx([more[1]] * 3, rel=0.03)
    assert predictions[3].samples_per_s == pytest.approx(4 * 4096 * 8 / lengths[3])


def test_many_passes_of_one_gpu_are_its_own_measure() -> None:
    assert tower(strategy="single", accumulate=7).efficiency == pytest.approx(1, rel=1e-3)


class Partly(Tower):
    """A layer that no output depends on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1:](x)


def test_parameters_that_are_not_used() -> None:
    """DDP reduces their part of the buckets too, and refuses them unless it may look for them."""
    asked: dict[str, Any] = {"batch": 8, "gpus": 2, "profile": DGX, "example": EXAMPLE}
    prediction = predict(Partly(), find_unused_parameters=True, **asked)
    assert sum(prediction.buckets) == WEIGHTS
    assert prediction.memory_bytes["gradients"] < WEIGHTS
    with pytest.raises(ValueError, match="The step of Partly fails: Expected to have finished"):
        predict(Partly(), **asked)


@pytest.mark.parametrize("loader", [0.5, "128/s"])
def test_a_slow_loader_sets_the_pace(loader: float | str) -> None:
    prediction = tower(gpus=2, loader=loader)
    assert prediction.step_s == pytest.approx(0.5)
    (wait,) = [s for s in prediction.trace.spans if s.kind == "data"]
    assert wait.duration == pytest.approx(0.5 - tower(gpus=2).step_s)
    assert "wait" in prediction.notes[-1]


def test_a_quick_loader_changes_nothing() -> None:
    assert tower(gpus=2, loader=1e-6).step_s == tower(gpus=2).step_s


def test_precision_decides_the_rate() -> None:
    """Large products on an A100: tensor cores are quicker than the others."""
    large = big(width=4096, depth=4)
    example = torch.zeros(1, 4096, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta")
    times = {
        p: predict(large, 4096, "single", precision=p, example=example).step_s
        for p in ("fp32", "tf32", "bf16", "amp")
    }  # fmt: skip
    assert times["fp32"] > 1.5 * times["tf32"] > 1.5 * times["bf16"]
    assert times["bf16"] < times["amp"] < times["tf32"]


@pytest.mark.parametrize(
    ("profile", "precision", "words"),
    [
        ("V100-SXM2", "bf16", "A V100-SXM2 has no bf16 units: .* as long as in fp32"),
        ("T4", "tf32", "A T4 has no tf32 units"),
        ("P100", "bf16", "A P100 has no bf16 units"),
        ("P100", "amp", "A P100 has no tensor cores for amp: .* 2 times as fast as in fp32"),
        ("P100", "fp32", ""), ("V100-SXM2", "amp", ""), ("A100-PCIe", "bf16", ""),
        ("RTX-4090", "tf32", ""),
    ],
)  # fmt: skip
def test_a_precision_that_the_gpu_lacks_is_said(profile: str, precision: str, words: str) -> None:
    notes = predict("mlp", 8, "single", profile=profile, precision=precision).notes
    assert len(notes) == bool(words)
    assert re.match(words, "".join(notes))


def test_tf32_is_no_slower_where_its_peak_is_no_higher() -> None:
    asked: dict[str, Any] = {"strategy": "single", "profile": "RTX-4090", "seq": 128}
    plain, tf32 = (predict("bert_base", 8, precision=p, **asked).step_s for p in ("fp32", "tf32"))
    assert tf32 <= plain


def test_gradients_in_the_buckets_are_not_copied_back() -> None:
    """The host alone copies 8 gradients; with views it issues no copy at all."""
    own, views = (tower(gpus=2, gradient_as_bucket_view=v) for v in (False, True))
    copies = [sum(s.name == "copy_" for s in p.trace.spans) for p in (own, views)]
    assert copies == [8, 0]
    assert views.step_s < own.step_s


@pytest.mark.parametrize("name", ["rn50", "rn101"])
def test_ddp_on_one_gpu_costs_what_was_published(name: str) -> None:
    """Its copies into and out of buckets, and its broadcast of buffers, without communication."""
    rows = {p.name: p for p in published.rows("pytorch_ddp_benchmark")}
    points = rows[f"{name}-v100-1"], rows[f"{name}-v100-noddp"]
    ddp, alone = (predict(**p.asked).step_s for p in points)
    assert ddp / alone == pytest.approx(points[0].value / points[1].value, abs=0.015)


def test_data_parallel_divides_the_batch() -> None:
    prediction = tower(strategy="dp", gpus=4, batch=256)
    assert {"GPU 0", "GPU 3"} <= set(prediction.trace.devices)
    assert prediction.samples_per_s == pytest.approx(256 / prediction.step_s)
    assert "GPUs after GPU 0" in prediction.notes[0]
    assert prediction.efficiency < 1


def test_cost_does_not_grow_with_the_number_of_gpus() -> None:
    few, many = tower(gpus=8, nodes=2), tower(gpus=8, nodes=128)
    assert len(few.trace.spans) == len(many.trace.spans)
    assert few.trace.devices == many.trace.devices
    reduced = Entry("collective", "main", 0, 0, "", None, Collective("all_reduce", (0, 1), "all"))
    (spread,) = ddp.spread([reduced], 1 << 20)
    assert len(spread.ref.devices) == 1 << 20 and sys.getsizeof(spread.ref.devices) < 100


def test_a_scaling_curve_has_the_points_of_predict() -> None:
    curve = scaling("mlp", (1, 8, 64), batch=64, profile=DGX)
    for world, rate in curve:
        alone = predict("mlp", 64, gpus=min(world, 8), nodes=-(-world // 8), profile=DGX)
        assert rate == pytest.approx(alone.samples_per_s, rel=1e-3)
    assert [n for n, _ in scaling("mlp", profile="V100-SXM2")] == [1, 2, 4, 8]  # no fabric


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"worlds": (0,)}, "worlds must be whole numbers of GPUs, .* but one is 0"),
        ({"worlds": (8, 1.5)}, "but one is 1.5"),
        ({"worlds": (1 << 21,)}, "from 1 to 1,048,576"),
        ({"strategy": "dp"}, "lab.scaling is about 'ddp' and takes no strategy"),
        ({"batchsize": 3}, "Unknown argument of lab.scaling 'batchsize'. Did you mean batch"),
    ],
)  # fmt: skip
def test_an_impossible_curve_is_a_sentence(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scaling("mlp", **{"profile": DGX, **asked})


def test_passes_and_a_scaling_curve() -> None:
    curve = scaling("mlp", (1, 64), batch=64, profile=DGX, accumulate=4)
    whole = predict("mlp", 64, gpus=8, nodes=8, profile=DGX, accumulate=4)
    assert curve[1][1] == pytest.approx(whole.samples_per_s, rel=0.02)


def test_exposed_time_is_a_union() -> None:
    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


# -------------------------------------------------------------------------------- other batch sizes


ATTENTION = nn.TransformerEncoderLayer(32, 4, batch_first=True)
WORDS: dict[str, Any] = {
    "example": (torch.zeros(2, 8, 32), torch.zeros(2)),
    "criterion": lambda outputs, targets: outputs.square().mean(),
}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("small_cnn", {}), ("resnet_small", {"precision": "amp"}), (ATTENTION, WORDS),
        ("resnet_small", {"accumulate": 3, "gradient_as_bucket_view": True}),
    ],
)  # fmt: skip
def test_two_recordings_give_all_batch_sizes(model: Any, asked: dict[str, Any]) -> None:
    extended = Question(model, batch=24, gpus=2, record=scaled.recording, **asked)
    recorded = Question(model, batch=24, gpus=2, **asked)
    assert extended.entries == recorded.entries
    assert extended.answer().memory_bytes == recorded.answer().memory_bytes


def test_a_model_that_looks_at_its_batch_is_recorded_again() -> None:
    class Odd(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layers(x)
            return y + 1 if len(x) % 2 else y

    for batch in (8, 9):
        pair = [
            Question(Odd(), batch=batch, example=EXAMPLE, record=r)
            for r in (scaled.recording, library.recording)
        ]
        assert pair[0].entries == pair[1].entries


# ---------------------------------------------------------------------------- what it leaves alone


@pytest.fixture
def users_gpus() -> Iterator[Recorder]:
    virtual.enable(3, profile="T4", compute="real")
    yield state.recorder
    virtual.disable()


def test_the_users_virtual_gpus_are_as_before(users_gpus: Recorder) -> None:
    mine, broken = torch.ones(100, device="vgpu:1"), Broken()
    torch.vgpu.set_device(2)  # type: ignore[attr-defined]
    torch.manual_seed(7)
    before = torch.get_rng_state(), users_gpus.count, list(state.ledger.allocated)
    library._recordings.clear()
    predict("mlp", 8, gpus=2, profile=DGX)
    with pytest.raises(ValueError, match="fails"):
        predict(broken, 8, example=EXAMPLE)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (users_gpus.count, list(state.ledger.allocated)) == before[1:]
    assert state.recorder is users_gpus and (state.devices, state.phantom) == (3, False)
    assert torch.vgpu.current_device() == 2  # type: ignore[attr-defined]
    assert (mine + 1).sum().item() == 200
    torch.vgpu.set_device(0)  # type: ignore[attr-defined]


def test_the_users_module_is_as_before() -> None:
    model = Tower().eval()
    weights = [p.clone() for p in model.parameters()]
    predict(model, 8, example=EXAMPLE)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_changed_module_is_recorded_again() -> None:
    model = Tower()
    first = predict(model, 8, example=EXAMPLE).memory_bytes["parameters"]
    model.layers.append(nn.Linear(512, 512, bias=False))
    assert predict(model, 8, example=EXAMPLE).memory_bytes["parameters"] == first * 9 // 8


# --------------------------------------------------------------------------------------- bad input


class Broken(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.layers[5] = nn.Linear(500, 512)


class Reads(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * x.sum().item()


def alignment(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """CTC reads the lengths."""
    ones = torch.ones(len(scores), dtype=torch.int64)
    return nn.functional.ctc_loss(scores[None], targets[:, None], ones, ones)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "resnet5"}, "did you mean resnet50"),
        ({"profile": "DGX-A1000"}, "Did you mean DGX-A100"),
        ({"nodes": 2, "fabric": "ib-100"}, "Did you mean ib-100g"),
        ({"nodes": 2, "profile": "V100-SXM2"}, "2 nodes need a fabric .* eth-10g"),
        ({"strategy": "dpp"}, "Unknown strategy 'dpp'. Did you mean"),
        ({"precision": "fp8"}, "Unknown precision 'fp8'"),
        ({"gpus": 16}, "A node of DGX-1-V100 has 8 GPUs, but gpus is 16"),
        ({"strategy": "single", "gpus": 2}, "'single' uses one GPU"),
        ({"strategy": "dp", "nodes": 2}, "nodes must be 1"),
        ({"strategy": "dp", "gpus": 8, "batch": 4}, "4 samples do not reach 8 GPUs"),
        ({"batch": 0}, "batch must be a whole number, 1 or more, but is 0"),
        ({"accumulate": 1.5}, "accumulate must be a whole number"),
        ({"batch": 10**20}, "batch must be at most 1,000,000, but is 100,000,000,000,000,000,000"),
        ({"nodes": 10**9}, "nodes must be at most 1,048,576, but is 1,000,000,000"),
        ({"gpus": 8, "nodes": 2**18}, "262,144 nodes of 8 GPUs are more than 1,048,576 GPUs"),
        ({"accumulate": 100_000}, "accumulate must be at most 1,000, but is 100,000"),
        ({"model": "bert_base", "seq": "64"}, "seq must be a whole number, 1 or more, but is '64'"),
        ({"profile": None}, "profile must be a name or the path of a TOML file, but is None"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb must be a number of MiB"),
        ({"loader": "fast"}, "loader is 'fast', but must be seconds per batch"),
        ({"model": "bert_base", "seq": 600}, "seq is 600"),
        ({"model": Broken(), "example": EXAMPLE},
         r"The step of Broken fails in module 'layers.5' \(Linear\): .*500"),
        ({"model": Reads(), "example": EXAMPLE},
         "The step of Reads fails: .* cannot take a model whose control flow, .* values.$"),
        ({"model": Reads(), "example": EXAMPLE, "strategy": "dp", "gpus": 2, "batch": 8},
         "The step of Reads fails.*: .* cannot take a model whose control flow, .* values.$"),
        ({"model": Tower(), "example": EXAMPLE, "criterion": alignment},
         "The step of Tower fails: _ctc_loss .* cannot take a model whose .* loss depend on"),
        ({"model": Tower()}, "needs an example"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        predict(**{"model": "mlp", "profile": DGX, **asked})
    assert "\n" not in str(caught.value)
    assert "compute='real'" not in str(caught.value), "a prediction has no such choice"


# ------------------------------------------------------------------------------------- the command


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model mlp --batch 64 --gpus 8 --nodes 2 --profile DGX-1-V100 --json"
    words += " --fabric ib-4x100g --precision fp32 --strategy ddp --bucket-cap-mb 25"
    assert main(words.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = predict("mlp", 64, gpus=8, nodes=2, profile=DGX, fabric="ib-4x100g")
    assert printed == expected.as_dict()
    assert {"step_s", "samples_per_s", "efficiency", "exposed_communication_s", "memory_bytes",
            "fits"} <= printed.keys()  # fmt: skip


def test_the_command_on_a_batch_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model bert_base --seq 128 --batch 512 --profile V100-SXM2"
    assert main(words.split()) == 0
    assert "Out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["nowhere/x.json", "."])
def test_a_trace_that_cannot_be_written(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "--model", "mlp", "--trace", str(tmp_path / place)]) == 2
    assert "The trace cannot be written to" in capsys.readouterr().err


def test_the_command_on_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", "resnet5", "--json"]) == 2
    assert "did you mean resnet50" in capsys.readouterr().err
