"""Measuring inside a rank: what is recorded, that it survives, and how it becomes one trace."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labutils import rundir, telemetry
from labutils.launch import RankFailure, device, launch
from labutils.trace import Trace, rank_rows

CPU = torch.device("cpu")


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run.json").write_text(
        json.dumps({"title": "test", "start_ns": time.monotonic_ns()})
    )
    telemetry.start(rundir.rank_file(str(tmp_path), 0), 0, CPU)
    yield tmp_path
    telemetry.stop()


def test_spans_nest_and_have_kinds(recording: Path) -> None:
    with telemetry.span("forward"), telemetry.span("my layer"):
        time.sleep(0.02)
    with telemetry.span("step", kind="optimizer"):
        pass
    telemetry.stop()
    trace = rundir.merge(str(recording))
    assert [(s.name, s.kind) for s in trace.spans] == [
        ("my layer", "span"), ("forward", "forward"), ("step", "optimizer"),
    ]  # fmt: skip
    inner, outer, step = trace.spans
    assert outer.start <= inner.start <= inner.end <= outer.end <= step.start
    assert inner.duration >= 0.02
    assert {s.device for s in trace.spans} == {"rank 0"}
    assert trace.source == "measured"


def test_unknown_kind_is_an_error() -> None:
    with (
        pytest.raises(ValueError, match="known kinds are .*data, copy"),
        telemetry.span("x", "colour"),
    ):
        pass


def test_span_ends_when_its_code_raises(recording: Path) -> None:
    with pytest.raises(ZeroDivisionError), telemetry.span("data"):
        _ = 1 / 0
    assert [s.name for s in rundir.merge(str(recording)).spans] == ["data"]


def test_every_sink_hears_of_a_span() -> None:
    heard: list[Any] = []

    class Sink:
        def begin(self, name: str, kind: str) -> str:
            heard.append((name, kind))
            return name

        def end(self, token: str) -> None:
            heard.append(token)

    first, second = Sink(), Sink()
    telemetry.add_sink(first)
    telemetry.add_sink(second)
    with telemetry.span("data"):
        telemetry.remove_sink(first)
    telemetry.remove_sink(second)
    telemetry.remove_sink(second)
    with telemetry.span("unheard"):
        pass
    assert heard == [("data", "data"), ("data", "data"), "data", "data"]


def test_memory_of_its_own_is_sampled(recording: Path) -> None:
    time.sleep(2 * telemetry.SAMPLE_S)
    held = torch.ones(64 << 20, dtype=torch.uint8)
    telemetry.stop()
    samples = [s.allocated for s in rundir.merge(str(recording)).memory]
    assert samples[-1] - samples[0] >= 60 << 20
    assert held.numel() > 0


def test_what_was_written_survives_a_kill() -> None:
    def work() -> None:
        with telemetry.span("before"):
            pass
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure) as caught:
        launch(work, ranks=2)
    trace = caught.value.run.trace
    assert {s.device for s in trace.spans if s.name == "before"} == {"rank 0", "rank 1"}


def test_torn_and_foreign_lines_are_left_out(recording: Path) -> None:
    with telemetry.span("whole"):
        pass
    telemetry.stop()
    with open(rundir.rank_file(str(recording), 0), "a") as file:
        file.write('not json\n[1,2,"torn')
    assert [s.name for s in rundir.merge(str(recording)).spans] == ["whole"]


def test_full_disk_loses_lines_and_says_so(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    recorder = telemetry.Recorder("/dev/full", 0, CPU, 0, 0)
    for _ in range(3):
        recorder.end(recorder.begin("x", "span"))
    recorder.close()
    assert recorder.dropped >= 4


def test_follower_gives_each_line_once(recording: Path) -> None:
    follower = rundir.Follower(str(recording))
    with telemetry.span("one"):
        pass
    assert [s.name for s in follower.poll()[0]] == ["one"]
    assert follower.poll()[0] == []
    with telemetry.span("two"):
        pass
    assert [s.name for s in follower.poll()[0]] == ["two"]
    assert [s.name for s in follower.trace.spans] == ["one", "two"]


def _file(folder: Path, rank: int, offset_ns: int, error_ns: int, *lines: Any) -> None:
    header = {"rank": rank, "device": f"rank {rank}", "hardware": "h", "pid": 1, "capacity": 0,
              "offset_ns": offset_ns, "error_ns": error_ns}  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in (header, *lines))
    Path(rundir.rank_file(str(folder), rank)).write_text(text)


def test_clocks_are_brought_together(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"title": "t", "start_ns": 1_000_000_000}))
    span = [1_500_000_000, 1_600_000_000, "x", "span", "compute", 0, ""]
    late = [11_500_000_000, 11_600_000_000, "x", "span", "compute", 0, ""]
    _file(tmp_path, 0, 20, 50, span)  # within the uncertainty: the same clock
    _file(tmp_path, 1, -10_000_000_000, 2000, late)
    trace = rundir.merge(str(tmp_path))
    assert [s.start for s in trace.spans] == pytest.approx([0.5, 0.5])
    assert [s.end for s in trace.spans] == pytest.approx([0.6, 0.6])
    assert len(trace.notes) == 1
    assert "rank 1" in trace.notes[0]
    assert "uncertain to 2 µs" in trace.notes[0]
    part = rundir.merge(str(tmp_path), start_ns=1_550_000_000)
    assert part.spans[0].start == 0.0
    assert part.spans[0].end == pytest.approx(0.05)
    assert rundir.merge(str(tmp_path), start_ns=1_700_000_000).spans == []


def test_clock_offset_is_that_of_the_fastest_exchange() -> None:
    true_offset = -5000  # to be added to their clock to get ours
    exchanges = []
    for there, back in ((100, 900), (40, 60), (700, 300)):
        sent = 10_000
        exchanges.append((sent, sent + there - true_offset, sent + there + back))
    offset, error = rundir.clock_offset(exchanges)
    assert abs(offset - true_offset) <= error
    assert error == 50
    with pytest.raises(ValueError, match="at least one exchange"):
        rundir.clock_offset([])


def test_collectives_are_spans_with_bytes() -> None:
    def work() -> None:
        dist.all_reduce(torch.ones(1000))
        parts = [torch.empty(10) for _ in range(2)]
        dist.all_gather(parts, torch.ones(10))
        handle = dist.broadcast(torch.ones(5, dtype=torch.float64), 0, async_op=True)
        assert handle is not None
        handle.wait()
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
        dist.barrier()

    trace = launch(work, ranks=2).trace
    for rank in range(2):
        peer = "send" if rank == 0 else "recv"
        found = {
            s.name: s.bytes
            for s in trace.spans
            if s.device == f"rank {rank}" and s.kind == "communication"
        }
        assert found == {
            "all_reduce": 4000,
            "all_gather": 80,
            "broadcast": 40,
            peer: 12,
            "barrier": 0,
        }
    detail = next(s.detail for s in trace.spans if s.name == "all_reduce")
    assert detail == "float32 (1000,), sum, group of 2"
    assert {s.lane for s in trace.spans} == {"communication"}


def test_waiting_for_a_slow_rank_is_a_span_of_its_own() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(1))

    trace = launch(work, ranks=2).trace
    waits = {s.device: s.duration for s in trace.spans if s.kind == "wait"}
    assert waits["rank 0"] > 0.1
    assert waits.get("rank 1", 0.0) < 0.1


def _ddp_step(own_hook: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 20))
    calls = []
    if own_hook:

        def hook(state: Any, bucket: Any) -> Any:
            calls.append(bucket.index())
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])

        net.register_comm_hook(None, hook)
    torch.manual_seed(1 + dist.get_rank())
    net(torch.randn(4, 20)).square().mean().backward()
    assert not own_hook or calls
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_ddp_buckets_are_spans_and_gradients_are_the_mean() -> None:
    run = launch(_ddp_step, ranks=3)
    expected = []
    for rank in range(3):
        torch.manual_seed(0)
        layer = torch.nn.Linear(20, 20)
        torch.manual_seed(1 + rank)
        layer(torch.randn(4, 20)).square().mean().backward()
        expected.append([p.grad for p in layer.parameters()])
    for i in range(2):
        mean = torch.stack([grads[i] for grads in expected if grads[i] is not None]).mean(0)  # type: ignore[misc]
        assert all(torch.allclose(result[i], mean, atol=1e-6) for result in run.results)
    buckets = [s for s in run.trace.spans if s.name == "all_reduce of bucket 0"]
    assert [s.device for s in buckets] == ["rank 0", "rank 1", "rank 2"]
    assert {s.bytes for s in buckets} == {4 * (20 * 20 + 20)}


def test_a_users_own_hook_is_kept_and_timed() -> None:
    run = launch(_ddp_step, ranks=2, kwargs={"own_hook": True})
    assert any(s.name == "hook of bucket 0" for s in run.trace.spans)


def test_no_record_no_trace() -> None:
    run = launch(dist.get_rank, ranks=2, record=False)
    assert run.directory == ""
    assert run.trace == Trace()


def test_old_run_directories_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABUTILS_RUNS", str(tmp_path))
    monkeypatch.setattr(rundir, "_OLD_S", -1.0)
    for _ in range(rundir.KEPT + 5):
        rundir.create("x")
    assert len(list(tmp_path.iterdir())) == rundir.KEPT + 1
    assert tmp_path.stat().st_mode & 0o77 == 0 or tmp_path.stat().st_mode & 0o22 == 0
    monkeypatch.setattr(rundir, "_OLD_S", 3600.0)
    for _ in range(3):
        rundir.create("x")
    assert len(list(tmp_path.iterdir())) == rundir.KEPT + 4


def test_the_peak_between_two_samples_is_seen() -> None:
    def grow_and_shrink() -> int:
        gpu = device()
        with telemetry.span("forward"):
            for _ in range(2):
                torch.ones(2**20, device=gpu).add(1)  # 8 MiB, gone before the span ends
        return int(torch.get_device_module(gpu).max_memory_allocated(gpu))

    run = launch(grow_and_shrink, ranks=2)
    for rank, peak in enumerate(run.results):
        assert peak >= 2**23
        assert run.trace.peak_memory(rank_rows(rank)[1]) == peak
