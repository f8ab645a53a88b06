"""Watching CUDA devices, with the few calls to CUDA answered by a fake."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import GIB, FakeCuda

import labutils as lab
from labutils.cuda_source import CudaSource


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    lab.virtual.disable()
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_a_watch_measures_memory_and_operations(fake: FakeCuda) -> None:
    with lab.watch("on CUDA") as w:
        a = torch.randn(256, 256)
        with lab.span("product"):
            a @ a
    trace = w.trace
    assert (trace.source, trace.hardware, trace.title) == ("measured", "2 × Fake GPU", "on CUDA")
    assert trace.capacity == {"GPU 0": 16 * GIB, "GPU 1": 16 * GIB}
    assert trace.peak_memory("GPU 0") == GIB
    assert trace.peak_memory("GPU 1") == fake.asked * GIB
    assert "aten::mm" in {s.name for s in trace.spans}
    assert "lab.watch" not in {s.name for s in trace.spans}


def test_both_clocks_share_an_axis(fake: FakeCuda) -> None:
    with lab.watch("clocks") as w:
        a = torch.randn(1024, 1024)
        with lab.span("product"):
            a @ a
    (named,) = [s for s in w.trace.spans if s.name == "product"]
    (measured,) = [s for s in w.trace.spans if s.name == "aten::mm"]
    tolerance = 2e-3
    assert named.start - tolerance < measured.start
    assert measured.end < named.end + tolerance


def test_the_devices_are_waited_for_at_both_ends(fake: FakeCuda) -> None:
    source = CudaSource()
    source.start()
    assert fake.waited == [0, 1]
    source.stop()
    assert fake.waited == [0, 1, 0, 1]


def test_workers_of_a_loader_share_the_axis(fake: FakeCuda) -> None:
    data = [torch.full((64,), float(i)) for i in range(8)]
    with lab.watch_loading("beside CUDA") as w:
        for batch in lab.Loader(data, batch_size=4, num_workers=1, multiprocessing_context="fork"):
            with lab.span("step"):
                batch.sum()
    assert (w.trace.source, w.trace.hardware) == ("measured", "2 × Fake GPU")
    made = [s for s in w.trace.spans if s.lane == "worker 0" and s.name == "collate"]
    steps = [s for s in w.trace.spans if s.name == "step"]
    assert len(made) == len(steps) == 2
    tolerance = 2e-3
    assert all(m.end < s.start + tolerance for m, s in zip(made, steps))
    assert made[0].start > min(s.start for s in w.trace.spans if s.name == "wait for batch")
