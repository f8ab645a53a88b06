"""The scheduler against closed forms, and against a naive simulator on random programs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from timing_reference import Reference
from timing_toys import US, collective, copy, kernel, nanoseconds, note, times, toy

from labutils.timing import profiles
from labutils.timing.engines import Engine
from labutils.timing.profiles import Profile
from labutils.timing.schedule import Scheduler, schedule
from labutils.trace import Trace
from labutils.virtual.record import COMM_STREAM, Entry, Graph, Kernel


def play(entries: list[Entry], profile: Profile, devices: int = 4, **more: Any) -> Trace:
    return schedule(Graph(entries, devices=devices, **more), profile)


def rounded(trace: Trace) -> int:
    return round(trace.duration * 1e9)


# --------------------------------------------------------------------------------- one host thread


def test_short_kernels_wait_for_their_launch() -> None:
    """n launches of h each; the last kernel of length t runs after the last launch."""
    trace = play([kernel(500)] * 50, toy(python=4, dispatch=6, launch=3))
    assert rounded(trace) == 50 * 10 * US + 3 * US + 500
    assert times(trace, "GPU 0")[:2] == [(13_000, 13_500), (23_000, 23_500)]


def test_long_kernels_hide_their_launches() -> None:
    trace = play([kernel(50 * US)] * 50, toy(python=4, dispatch=6, launch=3))
    assert rounded(trace) == 10 * US + 3 * US + 50 * 50 * US
    assert all(a[1] == b[0] for a, b in pairwise(times(trace, "GPU 0")))


def test_a_view_costs_the_host_only() -> None:
    view = Entry("kernel", "main", 0, 0, "", Kernel("view", "view", "float32", 0, 0, 0))
    trace = play([view] * 10 + [kernel(100)], toy(python=4, dispatch=6))
    assert times(trace, "GPU 0") == [(10 * 4 * US + 10 * US, 50 * US + 100)]


def test_devices_run_side_by_side() -> None:
    trace = play([kernel(90 * US, device=d) for d in range(4)], toy(dispatch=10))
    assert [times(trace, f"GPU {d}")[0][0] for d in range(4)] == [10_000, 20_000, 30_000, 40_000]


def test_kernels_of_two_streams_take_turns_on_a_device() -> None:
    """The second stream's kernel slips into the gap that the wait for a copy leaves."""
    entries = [copy(50 * US, -1, 0, stream=7), note("record", 1, stream=7), note("wait", 1),
               kernel(10 * US), kernel(20 * US, stream=9), kernel(40 * US, stream=9)]  # fmt: skip
    trace = play(entries, toy())
    assert times(trace, "GPU 0") == [(50 * US, 60 * US)]
    assert times(trace, "GPU 0", "stream 1") == [(0, 20 * US), (60 * US, 100 * US)]


def test_the_host_waits_when_the_launch_queue_is_full() -> None:
    trace = play([kernel(1000 * US)] * 5, toy(dispatch=1, depth=2))
    waits = [nanoseconds(s) for s in trace.spans if s.name == "launch queue full"]
    ends = [end for _, end in times(trace, "GPU 0")]
    assert [end for _, end in waits] == ends[: len(waits)]
    assert len(waits) == 3


def test_phases_become_colours() -> None:
    entries = [kernel(5, phase=p) for p in ("", "forward", "backward", "optimizer", "data")]
    trace = play([*entries, copy(5, -1, 0)], toy())
    on_gpu = [span.kind for span in trace.spans if span.device == "GPU 0"]
    assert sorted(on_gpu) == ["backward", "copy", "data", "forward", "forward", "optimizer"]


def test_spans_of_the_host() -> None:
    entries = [note("begin", "outer"), kernel(5), note("begin", "inner"), kernel(5), note("end"),
               Entry("host", "main", -1, 0, "data", None, 25e-6), note("end")]  # fmt: skip
    trace = play(entries, toy(python=10))
    host = {s.name: (*nanoseconds(s), s.kind) for s in trace.spans if s.device == "host"}
    assert host == {
        "issue forward": (0, 20 * US, "other"),
        "inner": (10 * US, 20 * US, "span"),
        "data": (20 * US, 45 * US, "data"),
        "outer": (0, 45 * US, "span"),
    }


def test_host_activity_is_merged_into_few_spans() -> None:
    forward = [kernel(5, phase="forward")] * 1000
    backward = [kernel(5, phase="backward")] * 1000
    trace = play((forward + backward) * 3, toy(python=1))
    spans = [s for s in trace.spans if s.device == "host"]
    assert [s.name for s in spans] == ["issue forward", "issue backward"] * 3
    assert spans[0].detail == "1000 operations"


def test_memory_changes_when_the_stream_comes_to_it() -> None:
    entries = [kernel(50 * US), note("memory", 1000), kernel(10 * US), note("memory", -400)]
    trace = play(entries, toy(), allocated=(100, 200))
    samples = [(round(s.time * 1e9), s.device, s.allocated) for s in trace.memory]
    assert samples == [
        (0, "GPU 0", 100), (0, "GPU 1", 200), (50 * US, "GPU 0", 1100), (60 * US, "GPU 0", 700),
    ]  # fmt: skip


# -------------------------------------------------------------------------------- copies and waits


def test_a_copy_overlaps_with_computation_on_another_stream() -> None:
    entries = [kernel(100 * US), copy(80 * US, -1, 0, stream=3)]
    trace = play(entries, toy())
    assert times(trace, "GPU 0", "copy") == [(0, 80 * US)]
    assert rounded(trace) == 100 * US


def test_a_copy_on_the_same_stream_waits() -> None:
    trace = play([kernel(100 * US), copy(80 * US, -1, 0)], toy())
    assert times(trace, "GPU 0", "copy") == [(100 * US, 180 * US)]


def test_directions_have_an_engine_each_and_copies_of_one_direction_take_turns() -> None:
    entries = [copy(50 * US, -1, 0, stream=1), copy(50 * US, -1, 0, stream=2),
               copy(70 * US, 0, -1, stream=3)]  # fmt: skip
    trace = play(entries, toy())
    assert sorted(times(trace, "GPU 0", "copy")) == [
        (0, 50 * US), (0, 70 * US), (50 * US, 100 * US)
    ]  # fmt: skip


@pytest.mark.parametrize(("shared", "start"), [(1, 0), (2, 50 * US)])
def test_gpus_behind_one_switch_share_the_way_to_the_host(shared: int, start: int) -> None:
    entries = [copy(50 * US, -1, 0), copy(50 * US, -1, 1)]
    assert times(play(entries, toy(shared=shared)), "GPU 1", "copy")[0][0] == start


def test_pageable_copies_are_slow_and_block_the_host() -> None:
    pinned = play([copy(50 * US, -1, 0), kernel(1, device=1)], toy(sync=2))
    pageable = play([copy(50 * US, -1, 0, pinned=False), kernel(1, device=1)], toy(sync=2))
    assert times(pinned, "GPU 1")[0][0] == 0
    assert times(pageable, "GPU 0", "copy") == [(0, 100 * US)]  # half the bandwidth
    assert times(pageable, "GPU 1")[0][0] == 102 * US


def test_a_blocking_copy_blocks_the_host() -> None:
    trace = play([copy(300 * US, -1, 0, blocking=True), kernel(1, device=1)], toy())
    assert times(trace, "GPU 1")[0][0] == 300 * US
    (wait,) = [s for s in trace.spans if s.kind == "wait"]
    assert nanoseconds(wait) == (0, 300 * US)


def test_a_copy_between_gpus_follows_both_and_holds_both() -> None:
    entries = [kernel(30 * US), kernel(70 * US, device=1), copy(50 * US, 0, 1),
               kernel(10 * US), kernel(10 * US, device=1)]  # fmt: skip
    trace = play(entries, toy())
    for device in ("GPU 0", "GPU 1"):
        assert times(trace, device, "copy") == [(70 * US, 120 * US)]
        assert times(trace, device)[1] == (120 * US, 130 * US)


def test_copies_out_of_one_gpu_take_turns_and_the_other_way_is_free() -> None:
    entries = [copy(50 * US, 0, 1, stream=1, source_stream=1),
               copy(50 * US, 0, 2, stream=1, source_stream=2),
               copy(50 * US, 3, 0, stream=3, source_stream=3)]  # fmt: skip
    trace = play(entries, toy())
    assert times(trace, "GPU 1", "copy") == [(0, 50 * US)]
    assert times(trace, "GPU 2", "copy") == [(50 * US, 100 * US)]
    assert times(trace, "GPU 3", "copy") == [(0, 50 * US)]


@pytest.mark.parametrize(
    ("ref", "until"), [(None, 100), (("stream", 0), 40), (("stream", 5), 100), (("event", 1), 10)]
)
def test_what_a_synchronisation_waits_for(ref: Any, until: int) -> None:
    entries = [kernel(10 * US), note("record", 1), kernel(30 * US), copy(100 * US, -1, 0, stream=5),
               note("sync", ref), kernel(1, device=1)]  # fmt: skip
    trace = play(entries, toy(sync=3))
    assert times(trace, "GPU 1")[0][0] == (until + 3) * US


def test_a_stream_waits_for_an_event() -> None:
    entries = [kernel(40 * US), note("record", 1), kernel(40 * US), note("wait", 1, device=1),
               kernel(10 * US, device=1), note("wait", 99, device=2),
               kernel(10, device=2)]  # fmt: skip
    trace = play(entries, toy())
    assert times(trace, "GPU 1") == [(40 * US, 50 * US)]
    assert times(trace, "GPU 2") == [(0, 10)]  # nobody waits for what was never recorded


@pytest.mark.parametrize(("copying", "computing"), [(50, 80), (80, 50), (60, 60)])
def test_a_prefetcher_with_two_buffers(copying: int, computing: int) -> None:
    """Batch k is copied when batch k-2 has been computed: the recurrence of a pipeline."""
    entries: list[Entry] = []
    for k in range(20):
        if k >= 2:
            entries.append(note("wait", f"computed {k - 2}", stream=1))
        entries += [copy(copying * US, -1, 0, stream=1), note("record", f"copied {k}", stream=1)]
        entries += [note("wait", f"copied {k}"), kernel(computing * US)]
        entries.append(note("record", f"computed {k}"))
    copied, computed = [0] * 20, [0] * 20
    for k in range(20):
        begin = max(copied[k - 1] if k else 0, computed[k - 2] if k > 1 else 0)
        copied[k] = begin + copying * US
        computed[k] = max(copied[k], computed[k - 1] if k else 0) + computing * US
    trace = play(entries, toy())
    assert [end for _, end in times(trace, "GPU 0", "copy")] == copied
    assert [end for _, end in times(trace, "GPU 0")] == computed


# ------------------------------------------------------------------------------------- collectives


def test_a_collective_starts_with_the_last_and_ends_together() -> None:
    entries = [kernel((d + 1) * 10 * US, device=d) for d in range(3)]
    entries += [collective(50 * US, (0, 1)), kernel(5 * US), kernel(5 * US, device=2)]
    trace = play(entries, toy())
    for device in ("GPU 0", "GPU 1"):
        assert times(trace, device, "communication") == [(20 * US, 70 * US)]
    assert times(trace, "GPU 0")[1] == (70 * US, 75 * US)
    assert times(trace, "GPU 2")[1] == (30 * US, 35 * US)


def test_an_asynchronous_collective_overlaps_until_it_is_waited_for() -> None:
    entries = [kernel(10 * US), collective(50 * US, (0, 1), asynchronous=True), kernel(20 * US),
               note("record", 1, stream=COMM_STREAM), note("wait", 1), kernel(5 * US)]  # fmt: skip
    trace = play(entries, toy())
    assert times(trace, "GPU 0", "communication") == [(10 * US, 60 * US)]
    assert times(trace, "GPU 0") == [(0, 10 * US), (10 * US, 30 * US), (60 * US, 65 * US)]


def test_asynchronous_collectives_take_turns() -> None:
    entries = [collective(50 * US, (0, 1), asynchronous=True)] * 3
    spans = times(play(entries, toy()), "GPU 1", "communication")
    assert spans == [(0, 50 * US), (50 * US, 100 * US), (100 * US, 150 * US)]


def test_an_all_reduce_takes_as_long_as_its_ring() -> None:
    profile = profiles.load("DGX-A100")
    size, n = 1 << 30, 8
    entry = collective(size, tuple(range(n)))
    entry = entry._replace(ref=entry.ref._replace(op="all_reduce"))
    start, end = times(play([entry], profile, devices=n), "GPU 0", "communication")[0]
    assert (end - start) / 1e9 == pytest.approx(2 * (n - 1) / n * size / 229e9, rel=0.01)


def test_merged_ranks_meet_in_order_on_their_own_streams() -> None:
    entries = []
    for rank in range(3):
        main = f"rank {rank}/main"
        entries += [kernel((rank + 1) * 10 * US, main, rank)]
        for number in range(2):
            entries.append(
                collective(40 * US, (0, 1, 2), main, rank, group="world", sequence=number)
            )
        entries.append(kernel(5 * US, main, rank))
    player = Scheduler(toy(), 3, merged=True)
    player.feed(entries)
    player.finish()
    trace = player.trace()
    for rank in range(3):  # a broadcast to three has one more hop of no latency
        spans = times(trace, f"rank {rank}", "communication")
        assert spans == [(30 * US, 70 * US), (70 * US, 110 * US)]
        assert times(trace, f"rank {rank}")[1] == (110 * US, 115 * US)


def test_one_rank_alone_does_not_wait_for_the_others() -> None:
    entries = [collective(40 * US, (0, 1, 2, 3), group="world", sequence=9), kernel(5)]
    trace = play(entries, toy(), devices=1)
    assert times(trace, "GPU 0", "communication") == [(0, 40 * US)]
    assert trace.notes == []


def test_what_never_happens_is_noted() -> None:
    player = Scheduler(toy(), 2, merged=True)
    entry = collective(40, (0, 1), "rank 0/main", 0, group="g", sequence=1)
    player.feed([entry])  # it, and the caller's stream behind it
    player.finish()
    assert player.trace().notes == ["2 operations wait for something that never happened."]


# ----------------------------------------------------------------------------------------- threads

WORKERS = [f"Thread-{n} (_worker)" for n in (9, 10, 11, 12)]


def parallel(bodies: dict[str, list[Entry]]) -> list[Entry]:
    """Start a thread for each body, and join them all."""
    forks = [note("fork", name) for name in bodies]
    joins = [note("join", name) for name in bodies]
    return [*forks, *(entry for body in bodies.values() for entry in body), *joins]


def test_two_threads_share_the_gil() -> None:
    """With g held and c free per launch, two threads issue in max(g + c, 2 g) each round."""
    for held, free in ((10, 5), (5, 10), (10, 10)):
        bodies = {w: [kernel(1, w, d)] * 100 for d, w in enumerate(WORKERS[:2])}
        trace = play(parallel(bodies), toy(python=held, dispatch=free))
        each = max(held + free, 2 * held)
        start = held  # the second thread begins when the first releases the GIL
        assert rounded(trace) == (99 * each + start + held + free) * US + 1


def test_autograd_threads_need_no_gil() -> None:
    names = [f"autograd {d}" for d in range(4)]
    bodies = {w: [kernel(1, w, d)] * 100 for d, w in enumerate(names)}
    trace = play(parallel(bodies), toy(python=50, dispatch=50, engine=10))
    assert rounded(trace) == 100 * 10 * US + 1
    issuing = {s.lane for s in trace.spans if s.device == "host" and s.kind == "other"}
    assert issuing == set(names)


def test_starting_threads_costs_time_one_after_the_other() -> None:
    bodies = {w: [kernel(1, w, d)] for d, w in enumerate(WORKERS)}
    trace = play(parallel(bodies), toy(thread=80, dispatch=5))
    assert [times(trace, f"GPU {d}")[0][0] for d in range(4)] == [
        85 * US, 165 * US, 245 * US, 325 * US
    ]  # fmt: skip


def test_a_join_waits_for_the_last_operation_that_was_issued() -> None:
    bodies = {w: [kernel(1, w, d)] * (d + 1) for d, w in enumerate(WORKERS)}
    trace = play([*parallel(bodies), kernel(1)], toy(dispatch=10))
    assert times(trace, "GPU 0")[-1][0] == 40 * US + 10 * US


def test_a_join_that_another_thread_logged_is_the_parents() -> None:
    one, two = WORKERS[:2]
    entries = [note("fork", one), kernel(1, one), note("fork", two), note("join", one, two),
               kernel(1, two, 1), kernel(1), note("join", two)]  # fmt: skip
    tidy = parallel({one: [kernel(1, one)], two: [kernel(1, two, 1)]})
    tidy.insert(-1, kernel(1))
    profile = toy(python=3, dispatch=10)
    assert play(entries, profile).spans[:2] == play(tidy, profile).spans[:2]


def test_workers_are_numbered_afresh_for_each_group() -> None:
    groups = [WORKERS, [f"Thread-{n} (_worker)" for n in (13, 14, 15, 16)]]
    entries: list[Entry] = []
    for group in groups:
        entries += parallel({w: [kernel(1, w, d)] for d, w in enumerate(group)})
        entries.append(kernel(1))
    trace = play(entries, toy(python=10))
    assert trace.lanes("host") == ["main", "worker 0", "worker 1", "worker 2", "worker 3"]


def test_after_waits_for_another_threads_entry() -> None:
    one, two = "autograd 0", "autograd 1"
    entries = [note("fork", one), note("fork", two), kernel(1, one), kernel(1, one),
               note("after", 3, two), kernel(1, two, 1), note("join", one),
               note("join", two)]  # fmt: skip
    trace = play(entries, toy(engine=10))
    assert times(trace, "GPU 1")[0][0] == 30 * US


def test_after_counts_log_numbers_and_what_was_dropped_is_past() -> None:
    entries = [kernel(1), note("after", 70), kernel(1), note("after", 100), kernel(1)]
    trace = play(entries, toy(dispatch=10), first=100)
    assert rounded(trace) == 30 * US + 1


def test_a_thread_name_may_return() -> None:
    entries = []
    for _ in range(3):
        entries += parallel({"autograd 0": [kernel(7, "autograd 0")]})
        entries.append(kernel(5))
    trace = play(entries, toy(dispatch=10, engine=1))
    assert [start for start, _ in times(trace, "GPU 0")] == [
        1_000, 11_000, 12_000, 22_000, 23_000, 33_000
    ]  # fmt: skip


# ---------------------------------------------------------- random programs, against the reference


def random_program(rng: random.Random) -> dict[str, list[Entry]]:
    """A main thread that starts workers and autograd threads, on four devices of one stream."""
    programs: dict[str, list[Entry]] = {"main": []}
    events = 0

    def body(thread: str, length: int) -> list[Entry]:
        nonlocal events
        entries: list[Entry] = []
        mine: list[int] = []
        device = rng.randrange(4)
        for _ in range(length):
            what = rng.random()
            if what < 0.6:
                entries.append(kernel(rng.randrange(1, 60), thread, device, phase=rng.choice("ab")))
            elif what < 0.7:
                device = rng.randrange(4)
            elif what < 0.8:
                events += 1
                mine.append(events)
                entries.append(note("record", events, thread, device))
            elif what < 0.9 and mine:
                entries.append(note("wait", rng.choice(mine), thread, rng.randrange(4)))
            elif what < 0.95:
                entries.append(note("sync", None, thread, device))
        return entries

    for group in range(rng.randrange(1, 4)):
        programs["main"] += body("main", rng.randrange(8))
        if rng.random() < 0.5:
            source, target = rng.sample(range(4), 2)
            programs["main"].append(copy(rng.randrange(1, 50), source, target))
        if rng.random() < 0.5:
            programs["main"].append(collective(rng.randrange(1, 50), (0, 1)))
        kind = rng.choice(["Thread-{}{}", "autograd {}{}"])
        names = [kind.format(group, i) for i in range(rng.randrange(1, 4))]
        programs["main"] += [note("fork", name) for name in names]
        programs |= {name: body(name, rng.randrange(1, 10)) for name in names}
        programs["main"] += [note("join", name) for name in names]
        programs["main"].append(kernel(3))
    return programs


def interleave(programs: dict[str, list[Entry]], rng: random.Random) -> list[Entry]:
    """One log that the operating system could have made of the programs."""
    left = {name: list(entries) for name, entries in programs.items()}
    started, log = ["main"], []
    while any(left.values()):
        name = rng.choice([n for n in started if left[n]])
        entry = left[name][0]
        if entry.what == "join" and left[entry.ref]:
            continue
        if entry.what == "fork":  # threads that start together report in any order
            run = 0
            while run < len(left[name]) and left[name][run].what == "fork":
                run += 1
            chosen = rng.randrange(run)
            left[name][0], left[name][chosen] = left[name][chosen], left[name][0]
            entry = left[name][0]
            started.append(entry.ref)
        log.append(left[name].pop(0))
    return log


NANOSECONDS = {"python": 0.007, "dispatch": 0.011, "engine": 0.013, "launch": 0.005}


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_agree_with_a_naive_simulator(seed: int) -> None:
    rng = random.Random(seed)
    programs = random_program(rng)
    expected = Reference(programs, held=7, free=11, engine=13, launch=5).run()
    trace = play(interleave(programs, rng), toy(**NANOSECONDS))
    seen = {
        (s.name, *nanoseconds(s)) for s in trace.spans if s.device != "host"
    }  # copies and collectives show on several devices
    by_id = {id(e): e for entries in programs.values() for e in entries}
    assert seen == {(by_id[i].kernel.name, start, end) for i, start, end in expected}  # type: ignore[union-attr]
    assert len([s for s in trace.spans if s.device != "host"]) >= len(expected)


def rich_program(rng: random.Random) -> dict[str, list[Entry]]:
    """As above, with streams, host copies, collectives of NCCL's stream, memory and spans."""
    programs = random_program(rng)
    for thread, entries in programs.items():
        for place in sorted(rng.sample(range(len(entries) + 1), len(entries) // 2), reverse=True):
            device, stream = rng.randrange(4), rng.randrange(3)
            entries.insert(place, rng.choice([
                kernel(rng.randrange(1, 90), thread, device, stream),
                copy(rng.randrange(1, 90), -1, device, thread=thread, stream=stream),
                copy(rng.randrange(1, 90), device, -1, thread=thread, pinned=False),
                copy(rng.randrange(1, 90), device, (device + 1) % 4, thread=thread, stream=stream),
                collective(rng.randrange(1, 90), (0, 1, 2, 3), thread, asynchronous=True),
                note("memory", rng.randrange(-99, 99), thread, device, stream),
                note("begin", "span", thread), note("end", None, thread),
                Entry("host", thread, -1, 0, "data", None, rng.randrange(1, 90) / 1e9),
            ]))  # fmt: skip
    return programs


def tell(trace: Trace) -> tuple[Any, ...]:
    return trace.spans, trace.memory, trace.notes


@pytest.mark.parametrize("seed", range(60))
def test_the_trace_does_not_depend_on_how_threads_were_interleaved(seed: int) -> None:
    programs = rich_program(random.Random(seed))
    profile = toy(**NANOSECONDS, thread=0.02, sync=0.003, shared=2, depth=4)
    traces = [play(interleave(programs, random.Random(n)), profile) for n in range(5)]
    assert all(tell(trace) == tell(traces[0]) for trace in traces[1:])


@pytest.mark.parametrize("seed", range(60))
def test_the_trace_does_not_depend_on_how_the_log_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    log = interleave(rich_program(rng), rng)
    profile = toy(**NANOSECONDS, thread=0.02, sync=0.003, shared=2, depth=4)
    whole = Scheduler(profile, 4)
    whole.feed(log)
    whole.finish()
    cuts = sorted({0, len(log), *(rng.randrange(len(log) + 1) for _ in range(rng.randrange(9)))})
    pieces = Scheduler(profile, 4)
    seen = 0
    for start, end in pairwise(cuts):
        before = list(pieces.spans)
        pieces.feed(log[start:end])
        assert pieces.spans[: len(before)] == before  # what is decided stays
        seen = max(seen, len(before))
    pieces.finish()
    assert (pieces.spans, pieces.memory) == (whole.spans, whole.memory)


def test_a_running_program_is_decided_as_far_as_possible() -> None:
    """All that main has issued is decided, although the devices are far behind it."""
    player = Scheduler(toy(dispatch=1), 1)

    def decided() -> int:
        return sum(span.device == "GPU 0" for span in player.spans)

    player.feed([kernel(1000 * US)] * 10)
    assert decided() == 10
    player.feed([note("fork", WORKERS[0]), kernel(5), kernel(5)])
    assert decided() == 10  # the worker may still say something
    player.feed([kernel(5, WORKERS[0]), note("join", WORKERS[0]), kernel(5)])
    assert decided() == 14


def test_the_trace_says_what_it_is() -> None:
    trace = play([kernel(5)], toy(), devices=2, capacity=(7, 8), dropped=3)
    assert (trace.source, trace.hardware, trace.dropped) == ("simulated", "toy", 3)
    assert trace.capacity == {"GPU 0": 7, "GPU 1": 8}
    assert [s.start for s in trace.spans] == sorted(s.start for s in trace.spans)


def test_fewer_costs_never_make_a_program_of_one_thread_slower() -> None:
    entries = [kernel(n % 7 * 3 * US, device=n % 2) for n in range(50)]
    fast = toy(dispatch=5)
    slow = replace(fast, host=replace(fast.host, dispatch_seconds=9e-6))
    assert rounded(play(entries, fast)) < rounded(play(entries, slow))


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_never_does_two_things_at_once(seed: int) -> None:
    rng, engine, taken = random.Random(seed), Engine(), []
    now = 0
    for _ in range(400):
        now += rng.randrange(3)
        ready, length = now + rng.randrange(30), rng.randrange(1, 9)
        start = engine.fit(ready, length)
        ends = [end for _, end in taken if end > ready]
        free = min(
            at for at in (ready, *ends) if all(at + length <= a or b <= at for a, b in taken)
        )
        assert start == free
        engine.take(start, start + length, now)
        taken.append((start, start + length))
