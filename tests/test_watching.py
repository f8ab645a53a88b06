"""``lab.watch`` on virtual GPUs and on the host."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import labutils as lab
from labutils.trace import Trace
from labutils.virtual.state import state


def step(module: nn.Module, device: str = "vgpu:0") -> None:
    module.zero_grad()
    loss = F.cross_entropy(module(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long).to(device))
    loss.backward()


@pytest.fixture
def parallel() -> nn.DataParallel:
    devices = lab.gpus(2, profile="T4")
    return nn.DataParallel(nn.Linear(4, 3).to(devices[0]), device_ids=devices)


def test_the_trace_holds_what_ran(parallel: nn.DataParallel) -> None:
    with lab.watch("one step") as w:
        step(parallel)
    trace = w.trace
    assert (trace.source, trace.hardware, trace.title) == ("simulated", "T4", "one step")
    assert {"GPU 0", "GPU 1", "host"} == set(trace.devices)
    kinds = {s.kind for s in trace.spans if s.device == "GPU 1"}
    assert {"copy", "forward", "backward", "communication"} <= kinds
    assert trace.capacity["GPU 0"] == torch.vgpu.get_device_properties(0).total_memory


def test_the_same_program_gives_the_same_trace_to_the_nanosecond(
    parallel: nn.DataParallel,
) -> None:
    step(parallel)
    traces = []
    for _ in range(3):
        with lab.watch("again") as w:
            step(parallel)
        traces.append(w.trace)
    assert traces[0].spans == traces[1].spans == traces[2].spans
    assert traces[0].memory == traces[1].memory == traces[2].memory


def test_memory_of_the_trace_is_that_of_the_ledger() -> None:
    lab.virtual.enable(1, profile="T4")
    layer = nn.Linear(64, 64, bias=False).to("vgpu:0")
    x = torch.randn(32, 64, device="vgpu:0")
    torch.vgpu.reset_peak_memory_stats(0)
    with lab.watch("forward") as w:
        y = layer(x)
    before, output = 64 * 64 * 4 + 32 * 64 * 4, 32 * 64 * 4
    samples = [s.allocated for s in w.trace.memory if s.device == "GPU 0"]
    assert samples[0] == before
    assert samples[-1] == before + output == torch.vgpu.memory_allocated(0)
    assert w.trace.peak_memory("GPU 0") == torch.vgpu.max_memory_allocated(0)
    del y


def test_a_named_span_is_on_the_host(parallel: nn.DataParallel) -> None:
    with lab.watch("named") as w, lab.span("my step"):
        step(parallel)
    (named,) = [s for s in w.trace.spans if s.name == "my step"]
    assert (named.device, named.lane) == ("host", "main")
    assert 0 < named.duration <= w.trace.duration


def test_an_error_in_the_block_passes_on_and_the_trace_stays(parallel: nn.DataParallel) -> None:
    w = lab.watch("failing")
    with pytest.raises(ZeroDivisionError), w:
        step(parallel) or 1 / 0
    assert w.trace.spans
    assert w.trace.notes == ["ended by ZeroDivisionError"]


def test_a_long_run_is_followed_while_it_runs(
    parallel: nn.DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labutils.watching.PERIOD_S", 0.01)
    with lab.watch("long") as w:
        for _ in range(5):
            step(parallel)
            time.sleep(0.03)
    monkeypatch.undo()
    with lab.watch("in one go") as once:
        for _ in range(5):
            step(parallel)
    assert w.trace.spans == once.trace.spans


def test_what_the_log_could_not_keep_is_counted(
    parallel: nn.DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import deque

    monkeypatch.setattr("labutils.watching.PERIOD_S", 60)
    monkeypatch.setattr(state.recorder, "log", deque(maxlen=50))
    with lab.watch("too much") as w:
        step(parallel)
    assert w.trace.dropped > 0


def test_the_trace_survives_a_round_trip_through_a_file(
    parallel: nn.DataParallel, tmp_path: object
) -> None:
    with lab.watch("saved") as w:
        step(parallel)
    path = f"{tmp_path}/step.json"
    w.trace.save(path)
    assert Trace.load(path) == w.trace


def test_without_gpus_the_named_spans_are_measured() -> None:
    lab.virtual.disable()
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    with lab.watch("host") as w, lab.span("sleep"):
        time.sleep(0.05)
    (span,) = w.trace.spans
    assert (w.trace.source, span.name, span.device) == ("measured", "sleep", "host")
    assert 0.05 <= span.duration < 1
