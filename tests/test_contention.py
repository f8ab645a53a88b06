"""What a collective takes from kernels and copies beside it, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timing_toys import US, collective, copy, kernel, times, toy

from labutils.timing import cost, profiles
from labutils.timing.contention import Load, Traffic, beside, load
from labutils.timing.predict import predict
from labutils.timing.schedule import schedule
from labutils.virtual.record import Entry, Graph, Kernel

V100 = profiles.load("DGX-1-V100")
A100 = profiles.load("DGX-A100")


@pytest.mark.parametrize(
    ("gigabytes", "processors"), [(12, 2), (24, 2), (190, 16), (1, 2), (240, 20)]
)
def test_processors_are_those_that_nccl_names(gigabytes: float, processors: int) -> None:
    """NVIDIA/nccl#689: 2 for a network of up to 24 GB/s, 16 for 190 GB/s; never fewer than 2."""
    assert load(gigabytes * 1e9, 1.0, A100).processors == processors


def test_a_ring_passes_memory_three_times() -> None:
    found = load(100e9, 1.0, V100)
    usable = V100.gpu.memory_bandwidth * V100.model.memory_efficiency
    assert found.bandwidth == pytest.approx(300e9 / usable)
    assert load(1e15, 1.0, V100).bandwidth == 0.9  # something is always left


def test_a_core_that_is_alone_shares_its_time() -> None:
    cpu = replace(V100, gpu=replace(V100.gpu, multi_processor_count=1))
    assert load(6e9, 1.0, cpu) == pytest.approx(Load(0.5, 0.5))
    assert beside(cpu, Load(0.5, 0.0)).gpu.peak["float32"] == V100.gpu.peak["float32"] / 2


def test_a_kernel_beside_a_collective_has_a_smaller_gpu() -> None:
    smaller = beside(V100, Load(8, 0.25)).gpu
    assert smaller.multi_processor_count == 72
    assert smaller.memory_bandwidth == 0.75 * V100.gpu.memory_bandwidth
    assert smaller.peak["float16"] == pytest.approx(0.9 * V100.gpu.peak["float16"])
    wide = Kernel("add", "elementwise", "float32", 0, 8 << 28, 4 << 28)
    alone, slowed = (cost.kernel_seconds(wide, p) for p in (V100, beside(V100, Load(8, 0.25))))
    assert slowed / alone == pytest.approx(4 / 3, rel=1e-3)


def test_one_wave_becomes_two() -> None:
    """80 tiles fit an idle V100 at once; with 8 of its 80 multiprocessors taken they do not."""
    shapes = ((8 * 128, 4096), (4096, 10 * 128))
    flops, outputs = 2 * 1024 * 4096 * 1280, 1024 * 1280
    gemm = Kernel("mm", "gemm", "float32", flops, 0, 4 * outputs, shapes)
    alone, slowed = (cost.kernel_seconds(gemm, p) for p in (V100, beside(V100, Load(8, 0.0))))
    assert 80 / 72 < slowed / alone <= 2


# --------------------------------------------------------------------------------- in the schedule


def half(_: Load) -> int:
    """100 ns of work take 200."""
    return 200


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (0, 100),  # over before the collective begins at 100
        (50, 200),  # 50 ns alone, then 50 ns of work in 100
        (100, 300),  # all of it beside
        (250, 400 - 25),  # 50 ns do 25 ns of work, the other 75 follow
        (300, 400),  # afterwards
    ],
)
def test_work_goes_on_at_half_its_pace(start: int, end: int) -> None:
    traffic = Traffic()
    traffic.add(100, 300, Load(2, 0.5), 0)
    assert traffic.end(start, 100, half) == end


def test_between_collectives_it_is_alone() -> None:
    traffic = Traffic()
    for begin in (10, 30, 500):
        traffic.add(begin, begin + 10, Load(2, 0.5), 0)
    assert traffic.end(0, 100, half) == 110  # 20 ns beside others did 10 ns of work
    traffic.add(600, 610, Load(2, 0.5), 400)  # those over by 400 are forgotten
    assert traffic.end(495, 100, half) == 495 + 100 + 5


def test_a_schedule_stretches_what_overlaps() -> None:
    """A broadcast of 100 us on its own stream; it passes memory at half of what kernels could."""
    beside_it = collective(100 * US, (0, 1), group="world", asynchronous=True)
    entries = [kernel(10 * US), beside_it, kernel(30 * US), kernel(200 * US)]
    apart, together = (
        times(schedule(Graph(entries, devices=1), toy(passes=passes)), "GPU 0")
        for passes in (0.0, 1.0)
    )
    assert apart == [(0, 10 * US), (10 * US, 40 * US), (40 * US, 240 * US)]
    # a broadcast of a ring of two sends half of its bytes: half of the bandwidth is left
    assert together == [(0, 10 * US), (10 * US, 70 * US), (70 * US, 290 * US)]


def _loaded(link: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    profile = toy()
    profile = replace(profile, link=replace(profile.link, name=link))
    entries: list[Entry] = [
        collective(100 * US, (0, 1), group="world", asynchronous=True),
        copy(40 * US, -1, 0, stream=3),
    ]
    trace = schedule(Graph(entries, devices=1), profile)
    return times(trace, "GPU 0", "communication"), times(trace, "GPU 0", "copy")


def test_the_bus_is_one_way_for_all() -> None:
    """Where GPUs reach each other over PCIe only, a batch waits for the collective before it."""
    assert _loaded("wire") == ([(0, 100 * US)], [(0, 40 * US)])
    assert _loaded("bus") == ([(0, 100 * US)], [(100 * US, 140 * US)])


@pytest.mark.parametrize("profile", ["DGX-1-V100", "DGX-A100", "PCIe-box"])
def test_two_gpus_are_never_as_fast_as_one(profile: str) -> None:
    one, two = (predict("resnet18", 32, gpus=n, profile=profile).step_s for n in (1, 2))
    assert one < two < 1.1 * one
