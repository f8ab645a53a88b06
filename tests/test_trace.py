"""Traces: their numbers against brute force, their files against the format and torch.profiler."""

from __future__ import annotations

import gzip
import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from labutils.trace import IDLE_KINDS, KINDS, MemorySample, Span, Trace


def random_trace(seed: int, spans: int = 300) -> Trace:
    """Spans at whole nanoseconds that nest, touch and overlap on a few lanes."""
    draw = random.Random(seed)
    trace = Trace("simulated", "A100-SXM4-80GB", "random", capacity={"GPU 10": 3}, dropped=seed)
    trace.notes.append("first note, with “quotes”")
    for _ in range(spans):
        start = draw.randrange(1000)
        trace.spans.append(
            Span(
                draw.choice(["addmm", "ключ", 'a "b"']), start / 1e9,
                (start + draw.randrange(200)) / 1e9, f"GPU {draw.randrange(3)}",
                draw.choice(["compute", "copy", "communication"]), draw.choice(KINDS),
                draw.randrange(2**40), draw.choice(["", "float32"]),
            )
        )  # fmt: skip
        trace.memory.append(MemorySample(start / 1e9, "GPU 1", draw.randrange(2**36)))
    return trace


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_round_trip_is_exact(tmp_path: Path, seed: int, name: str) -> None:
    trace = random_trace(seed)
    trace.save(tmp_path / name)
    assert Trace.load(tmp_path / name) == trace
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_long_times_keep_their_nanosecond(tmp_path: Path) -> None:
    times = [86_400_000_000_001, 86_400_000_000_003]
    trace = Trace(spans=[Span("late", times[0] / 1e9, times[1] / 1e9, "host", "main", "other")])
    trace.save(tmp_path / "trace.json")
    (span,) = Trace.load(tmp_path / "trace.json").spans
    assert [round(span.start * 1e9), round(span.end * 1e9)] == times


@pytest.mark.parametrize("seed", range(3))
def test_busy_counts_every_nanosecond_once(seed: int) -> None:
    trace = random_trace(seed)
    work = [s for s in trace.spans if (s.device, s.lane) == ("GPU 0", "compute")
            and s.kind not in IDLE_KINDS]  # fmt: skip
    busy = {tick for span in work for tick in range(round(span.start * 1e9), round(span.end * 1e9))}
    assert trace.busy("GPU 0") == pytest.approx(len(busy) / 1e9)
    assert trace.utilisation("GPU 0") == pytest.approx(len(busy) / 1e9 / trace.duration)


def test_order_of_devices_and_lanes() -> None:
    lanes = ["stream 10", "stream 9", "copy", "communication", "compute"]
    trace = Trace(spans=[Span("x", 0, 1, device, lane, "other")
                         for device in ("host", "GPU 10", "GPU 9") for lane in lanes])  # fmt: skip
    assert trace.devices == ["GPU 9", "GPU 10", "host"]
    assert trace.lanes("GPU 9") == ["compute", "copy", "communication", "stream 9", "stream 10"]


def test_window_clips_spans_and_carries_memory() -> None:
    trace = Trace("measured", spans=[
        Span("before", 0, 1, "GPU 0", "compute", "other"),
        Span("across", 0.5, 3, "GPU 0", "compute", "other"),
        Span("inside", 2, 2.5, "GPU 0", "copy", "copy"),
        Span("after", 4, 5, "GPU 0", "compute", "other"),
    ], memory=[MemorySample(0, "GPU 0", 7), MemorySample(2, "GPU 0", 9),
               MemorySample(4.5, "GPU 0", 99)])  # fmt: skip
    part = trace.window(1, 4)
    assert [(s.name, s.start, s.end) for s in part.spans] == [("across", 0, 2), ("inside", 1, 1.5)]
    assert [(s.time, s.allocated) for s in part.memory] == [(0, 7), (1, 9), (3, 9)]
    assert part.duration == 3
    assert part.peak_memory("GPU 0") == 9
    with pytest.raises(ValueError, match="end after it starts"):
        trace.window(2, 2)


def test_summary_is_a_table() -> None:
    trace = Trace("simulated", "T4", spans=[Span("x", 0, 0.5, "GPU 0", "compute", "forward"),
                                            Span("y", 0.5, 1, "GPU 0", "copy", "copy")],
                  memory=[MemorySample(0, "GPU 0", 3 * 2**20)], dropped=2)  # fmt: skip
    assert trace.summary().splitlines() == [
        "1000.00 ms, simulated · T4",
        "device    compute  utilisation       copy  communication  peak memory",
        "GPU 0   500.00 ms          50%  500.00 ms        0.00 ms      3.0 MiB",
        "2 entries were lost",
    ]


# -- the file, against the Trace Event Format ------------------------------------------------------


@pytest.fixture
def document(tmp_path: Path) -> Any:
    random_trace(1).save(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())


def test_every_event_has_the_fields_of_its_phase(document: Any) -> None:
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            value = {"name": str, "sort_index": int}[event["name"].split("_", 1)[1]]
            assert any(isinstance(v, value) for v in event["args"].values())
        elif event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        else:
            assert event["ph"] == "C"
            assert all(isinstance(value, int) for value in event["args"].values())
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "X"}


def test_spans_of_one_thread_nest_or_do_not_overlap(document: Any) -> None:
    threads: dict[Any, list[tuple[int, int]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            threads.setdefault(event["tid"], []).append((start, start + length))
    for spans in threads.values():
        for (a0, a1), (b0, b1) in combinations(spans, 2):
            apart = a1 <= b0 or b1 <= a0
            nested = (a0 <= b0 and b1 <= a1) or (b0 <= a0 and a1 <= b1)
            assert apart or nested


# -- files of others -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not complete JSON"),
        (b'{"traceEvents": [{"ph": "X"', "not complete JSON"),
        (b"\xff\xfe\x00", "not complete JSON"),
        (b"\x1f\x8b not gzip", "not complete JSON"),
        (gzip.compress(b"{}" * 999)[:20], "not complete JSON"),
        (b"[1, 2]", "without a list of traceEvents"),
        (b'{"traceEvents": 3}', "without a list of traceEvents"),
        (b'{"traceEvents": []}', "another program"),
        (b'{"traceEvents": [], "otherData": {"version": "chrome"}}', "another program"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": 1}', "recorded no operation"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op"}], "baseTimeNanoseconds": 1}', "damaged"),
        (b'{"traceEvents": [7], "otherData": {"format": "labutils trace 1"}}', "damaged"),
    ],
)
def test_foreign_or_damaged_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("change", [{"dur": -1}, {"cat": "magic"}, {"ts": "now"}, {"pid": 99}])
def test_a_bad_event_in_our_own_file(tmp_path: Path, document: Any, change: Any) -> None:
    event = next(event for event in document["traceEvents"] if event["ph"] == "X")
    event.update(change)
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="damaged"):
        Trace.load(tmp_path / "bad.json")


def test_a_failed_save_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    random_trace(1).save(path)
    broken = random_trace(2)
    broken.notes.append(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.save(path)
    assert Trace.load(path) == random_trace(1)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_reads_what_torch_profiler_exports(tmp_path: Path, suffix: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("my part"):
            loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        optimizer.step()
    path = tmp_path / f"profile{suffix}"
    profiler.export_chrome_trace(str(path))

    trace = Trace.load(path)
    assert (trace.source, trace.devices) == ("measured", ["host"])
    mine = {(span.name, round(span.duration * 1e9)) for span in trace.spans}
    theirs = {(event.name, round(event.time_range.elapsed_us() * 1e3))
              for event in profiler.events() if event.name.startswith("aten::")}  # fmt: skip
    assert len(theirs) > 10
    near = {(name, ns + off) for name, ns in mine for off in (-1, 0, 1)}  # microseconds, rounded
    assert theirs <= near
    # torch's own list leaves out an operation whose only child has its name; nothing else is new
    assert {name for name, _ in mine if name.startswith("aten::")} == {name for name, _ in theirs}
    kinds = {span.name: span.kind for span in trace.spans}
    assert kinds["aten::addmm"] == "forward"
    assert kinds["aten::threshold_backward"] == "backward"
    assert kinds["my part"] == "span"
    assert trace.peak_memory("host") >= 4 * 8 * 4


def test_kernels_of_a_profile_take_the_place_of_their_launch(tmp_path: Path) -> None:
    """Fields as Kineto writes them (libkineto/src/output_json.cpp)."""

    def event(cat: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> Any:
        pid = args.get("device", 4242)
        return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur,
                "args": args}  # fmt: skip

    events = [
        event("cpu_op", "aten::mm", 1000.0, 9, 1),
        event("cuda_runtime", "cudaLaunchKernel", 1002.0, 3, 1, correlation=7),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1020.0, 20, 2),
        event("cuda_runtime", "cudaLaunchKernel", 1022.0, 3, 2, correlation=8),
        event("kernel", "ampere_sgemm", 1010.0, 5.5, 7, device=1, stream=7, correlation=7),
        event("kernel", "ampere_sgemm", 1030.0, 6, 7, device=1, stream=7, correlation=8),
        event("kernel", "ncclDevKernel_AllReduce", 1040.0, 9, 20, device=1, stream=20),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1001.0, 2, 7, device=1, stream=7,
              bytes=4096),
        {"ph": "i", "s": "t", "name": "[memory]", "pid": 4242, "tid": 1, "ts": 1003,
         "args": {"Total Allocated": 512, "Device Type": 1, "Device Id": 1, "Bytes": 512}},
    ]  # fmt: skip
    path = tmp_path / "gpu.json"
    device = {"id": 1, "name": "NVIDIA T4", "totalGlobalMem": 2**34}
    path.write_text(json.dumps({"deviceProperties": [device], "traceEvents": events}))
    trace = Trace.load(path)
    found = [(s.lane, s.kind, round(s.start * 1e9), round(s.end * 1e9), s.bytes)
             for s in trace.spans if s.device == "GPU 1"]  # fmt: skip
    assert found == [
        ("compute", "forward", 10_000, 15_500, 0),
        ("compute", "backward", 30_000, 36_000, 0),
        ("communication", "communication", 40_000, 49_000, 0),
        ("copy", "copy", 1_000, 3_000, 4096),
    ]
    assert trace.lanes("host") == ["main", "autograd 1"]
    assert (trace.hardware, trace.capacity) == ("NVIDIA T4", {"GPU 1": 2**34})
    assert trace.memory == [MemorySample(3e-6, "GPU 1", 512)]


def test_a_rank_is_found_under_both_names_of_its_row() -> None:
    rows = ["rank 1", "GPU 1", "rank 11", "GPU 11", "host", "GPU 0"]
    trace = Trace(spans=[Span(row, 0.0, 1.0, row, "compute", "forward") for row in rows])
    assert [span.name for span in trace.of_rank(1)] == ["rank 1", "GPU 1"]
    assert [span.name for span in trace.of_rank(0)] == ["GPU 0"]
    assert trace.of_rank(2) == []
