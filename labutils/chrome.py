"""Traces as files: Chrome Trace Event JSON, one process per device and one thread per track.

Format: "Trace Event Format" (Google, 2016), https://docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.  Times are microseconds; three decimals keep the
nanosecond.  ``torch.profiler`` exports the same format with its own categories.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labutils.notebooks import write_whole
from labutils.trace import KINDS, MemorySample, Span, Trace

FORMAT = "labutils trace 1"


def save(trace: Trace, path: Path) -> None:
    """Write ``trace``; an older file stays whole until the new one is complete."""
    data = json.dumps(_document(trace), separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_whole(path, data)


def load(path: Path) -> Trace:
    """Read a trace of ours or of torch.profiler; ValueError for anything else."""
    document = _read_json(path)
    try:
        about = document.get("otherData") or {}
        if about.get("format") == FORMAT:
            return _from_document(document["traceEvents"], about)
        if "baseTimeNanoseconds" in document or "deviceProperties" in document:
            return _from_profiler(document)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path} is damaged: one of its events cannot be read ({type(error).__name__}: "
            f"{error}); save or export the trace again."
        ) from error
    raise ValueError(
        f"{path} is a trace of another program: only files from Trace.save and from "
        "torch.profiler's export_chrome_trace can be read."
    )


def _read_json(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json.loads(data)
    except (ValueError, EOFError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not a trace: it is not complete JSON ({error}).") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path} is not a trace: it is JSON, but without a list of traceEvents.")
    return document


# -- our own files ---------------------------------------------------------------------------------


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e9) / 1000


def _seconds(microseconds: float) -> float:
    return round(microseconds * 1000) / 1e9


def _document(trace: Trace) -> dict[str, Any]:
    pids = {device: pid for pid, device in enumerate(trace.devices, start=1)}
    tracks = _tracks(trace.spans)
    events = [_name("process", pid, 0, device) for device, pid in pids.items()]
    used = {(s.device, s.lane, track) for s, track in zip(trace.spans, tracks, strict=True)}
    order = [(device, lane) for device in pids for lane in trace.lanes(device)]
    tids: dict[tuple[str, str, int], int] = {}
    for device, lane, track in sorted(used, key=lambda u: (order.index((u[0], u[1])), u[2])):
        tid = tids[device, lane, track] = len(tids) + 1
        events.append(_name("thread", pids[device], tid, lane, track))
    for kind in ("process", "thread"):
        events += [{"ph": "M", "name": f"{kind}_sort_index", "pid": e["pid"], "tid": e["tid"],
                    "args": {"sort_index": i}} for i, e in enumerate(events)
                   if e["name"] == f"{kind}_name"]  # fmt: skip
    for span, track in zip(trace.spans, tracks, strict=True):
        start, end = _microseconds(span.start), _microseconds(span.end)
        events.append({
            "ph": "X", "name": span.name, "cat": span.kind, "pid": pids[span.device],
            "tid": tids[span.device, span.lane, track], "ts": start,
            "dur": round((end - start) * 1000) / 1000,
            "args": {"bytes": span.bytes, "detail": span.detail},
        })  # fmt: skip
    events += [
        {"ph": "C", "name": "memory", "pid": pids[sample.device], "tid": 0,
         "ts": _microseconds(sample.time), "args": {"allocated": sample.allocated}}
        for sample in trace.memory
    ]  # fmt: skip
    about = ("source", "hardware", "title", "capacity", "dropped", "notes")
    other = {"format": FORMAT} | {key: getattr(trace, key) for key in about}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _name(kind: str, pid: int, tid: int, name: str, track: int = 0) -> dict[str, Any]:
    shown = f"{name} ({track + 1})" if track else name
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid,
            "args": {"name": shown, "lane": name}}  # fmt: skip


def _tracks(spans: Sequence[Span]) -> list[int]:
    """A track per span so that two spans of one track nest or do not touch, as viewers require."""
    open_ends: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    tracks = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].start, -spans[i].end)):
        stacks = open_ends[spans[i].device, spans[i].lane]
        for stack in stacks:
            while stack and stack[-1] <= spans[i].start:
                stack.pop()
        fits = (n for n, stack in enumerate(stacks) if not stack or spans[i].end <= stack[-1])
        tracks[i] = next(fits, len(stacks))
        if tracks[i] == len(stacks):
            stacks.append([])
        stacks[tracks[i]].append(spans[i].end)
    return tracks


def _from_document(events: list[dict[str, Any]], about: dict[str, Any]) -> Trace:
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["lane"] for e in events
             if e["name"] in ("process_name", "thread_name") and e["ph"] == "M"}  # fmt: skip
    trace = Trace(
        str(about["source"]), str(about["hardware"]), str(about["title"]),
        capacity={str(k): int(v) for k, v in about["capacity"].items()},
        dropped=int(about["dropped"]), notes=[str(note) for note in about["notes"]],
    )  # fmt: skip
    for event in events:
        if event["ph"] == "X":
            trace.spans.append(_span(event, names))
        elif event["ph"] == "C":
            device = names["process_name", event["pid"], 0]
            allocated = int(event["args"]["allocated"])
            trace.memory.append(MemorySample(_seconds(event["ts"]), device, allocated))
    return trace


def _span(event: dict[str, Any], names: dict[tuple[str, int, int], str]) -> Span:
    if event["dur"] < 0 or event["cat"] not in KINDS:
        raise ValueError(f"{event['name']} has kind {event['cat']} and lasts {event['dur']} µs")
    return Span(
        str(event["name"]), _seconds(event["ts"]), _seconds(event["ts"] + event["dur"]),
        names["process_name", event["pid"], 0],
        names["thread_name", event["pid"], event["tid"]],
        event["cat"], int(event["args"]["bytes"]), str(event["args"]["detail"]),
    )  # fmt: skip


# -- files of torch.profiler -----------------------------------------------------------------------

HOST_CATEGORIES = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}


def _from_profiler(document: dict[str, Any]) -> Trace:
    """Kernels by GPU; host operations by thread.  A kernel has the colour of what launched it."""
    events = [e for e in document["traceEvents"] if e.get("ph") in ("X", "i")]
    timed = [e for e in events if e.get("cat") in HOST_CATEGORIES | GPU_CATEGORIES]
    if not timed:
        raise ValueError("the profiler recorded no operation")
    origin = min(e["ts"] for e in timed)
    phase = _Phases(e for e in timed if e["cat"] in HOST_CATEGORIES)
    threads = _thread_names(timed, phase)
    launches = {e["args"]["correlation"]: e for e in timed
                if e["cat"].startswith("cuda_") and "correlation" in e.get("args", {})}  # fmt: skip
    properties = document.get("deviceProperties") or []
    trace = Trace("measured", properties[0]["name"] if properties else "CPU",
                  title=Path(str(document.get("traceName", ""))).name)  # fmt: skip
    trace.capacity = {f"GPU {p['id']}": int(p["totalGlobalMem"]) for p in properties}
    for event in timed:
        start, args = event["ts"] - origin, event.get("args", {})
        if event["cat"] in GPU_CATEGORIES:
            device, lane = f"GPU {args['device']}", _gpu_lane(event)
            kind = _gpu_kind(event, lane, phase.of(launches.get(args.get("correlation"))))
        else:
            device, lane = "host", threads[event["tid"]]
            kind = "span" if event["cat"] == "user_annotation" else phase.of(event)
        trace.spans.append(Span(
            str(event["name"]), _seconds(start), _seconds(start + event["dur"]), device, lane, kind,
            int(args.get("bytes", 0)), _detail(args)))  # fmt: skip
    trace.memory = _profiler_memory(events, origin)
    return trace


def _gpu_lane(event: dict[str, Any]) -> str:
    if event["cat"] == "gpu_memcpy":
        return "copy"
    return "communication" if event["name"].lower().startswith("nccl") else "compute"


def _gpu_kind(event: dict[str, Any], lane: str, launched_in: str) -> str:
    if event["cat"] == "gpu_user_annotation":
        return "span"
    return launched_in if lane == "compute" else lane


def _detail(args: dict[str, Any]) -> str:
    shapes = [shape for shape in args.get("Input Dims", []) if shape]
    return " ".join("×".join(map(str, shape)) for shape in shapes[:3] if isinstance(shape, list))


def _profiler_memory(events: list[dict[str, Any]], origin: float) -> list[MemorySample]:
    # torch's DeviceType: 0 is the CPU, 1 is CUDA
    found = [
        e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] in (0, 1)
    ]
    return [
        MemorySample(
            _seconds(max(e["ts"] - origin, 0.0)),
            f"GPU {e['args']['Device Id']}" if e["args"]["Device Type"] else "host",
            max(int(e["args"]["Total Allocated"]), 0),
        )
        for e in sorted(found, key=lambda e: e["ts"])
    ]


class _Phases:
    """Which part of a training step the host was in: autograd's and the optimizer's brackets."""

    def __init__(self, events: Any) -> None:
        self.brackets: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for e in events:
            kind = ("backward" if e["name"].startswith("autograd::engine") else
                    "optimizer" if e["name"].startswith("Optimizer.step") else "")  # fmt: skip
            if kind:
                self.brackets[e["tid"]].append((e["ts"], e["ts"] + e["dur"], kind))
        for brackets in self.brackets.values():
            brackets.sort()

    def of(self, event: dict[str, Any] | None) -> str:
        """The phase in which a host event happened; forward unless something says otherwise."""
        if event is None:
            return "other"
        brackets = self.brackets.get(event["tid"], [])
        i = bisect_right(brackets, event["ts"], key=lambda bracket: bracket[0]) - 1
        return brackets[i][2] if i >= 0 and event["ts"] <= brackets[i][1] else "forward"


def _thread_names(timed: list[dict[str, Any]], phase: _Phases) -> dict[Any, str]:
    """The first thread that worked is "main"; threads of autograd are told by what they do."""
    names: dict[Any, str] = {}
    host = sorted((e for e in timed if e["cat"] in HOST_CATEGORIES), key=lambda e: e["ts"])
    for tid in dict.fromkeys(e["tid"] for e in host):
        kinds = {kind for _, _, kind in phase.brackets.get(tid, [])}
        prefix = "autograd" if kinds == {"backward"} else "worker"
        count = sum(name.startswith(prefix) for name in names.values())
        names[tid] = f"{prefix} {count + (prefix == 'autograd')}" if names else "main"
    return names
