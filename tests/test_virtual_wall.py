"""Virtual GPUs in real time, on a clock that only the test moves: against closed forms."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import labutils as lab
from labutils import virtual
from labutils.timing import cost, profiles
from labutils.virtual.record import Copy
from labutils.virtual.state import state
from labutils.virtual.wall import Clock
from tests.virtual_gpus import gpus

PROFILE = "V100-SXM2"
HARDWARE = profiles.load(PROFILE)
STEPS = 6
MS = 1_000_000


class FakeClock(Clock):
    """Stands still unless somebody waits."""

    def __init__(self) -> None:
        self.time = 0

    def now(self) -> int:
        return self.time

    def wait_until(self, moment: int) -> None:
        self.time = max(self.time, moment)


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(2, profile=PROFILE, pace="wall") as module, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield module


@pytest.fixture
def clock(vgpu: Any) -> FakeClock:
    fake = FakeClock()
    assert state.recorder.pacer is not None
    state.recorder.pacer.clock = fake
    return fake


class Toy:
    """A step of one large product, of a batch that takes ``load`` nanoseconds to load."""

    def __init__(self, clock: FakeClock, load: int, products: int) -> None:
        self.clock, self.load, self.products = clock, load, products
        self.weights = torch.empty(4096, 4096, device="vgpu:0")
        torch.vgpu.synchronize()
        self.host = torch.empty(4096, 4096)
        mark = state.recorder.count
        self.compute(self.weights)
        torch.vgpu.synchronize()
        found = [e.kernel for e in state.recorder.since(mark)[0] if e.kernel]
        self.compute_ns = sum(round(1e9 * cost.kernel_seconds(k, HARDWARE)) for k in found)

    def copy_ns(self, pinned: bool) -> int:
        copy = Copy(-1, 0, pinned, blocking=not pinned)
        return round(1e9 * cost.copy_seconds(self.host.nbytes, copy, HARDWARE))

    def loaded(self, pinned: bool) -> torch.Tensor:
        self.clock.time += self.load
        return self.host.pin_memory() if pinned else self.host

    def compute(self, batch: torch.Tensor) -> None:
        for _ in range(self.products):
            batch @ self.weights

    def seconds(self, loop: Callable[[Toy], None]) -> int:
        """Nanoseconds that ``loop`` takes."""
        start = self.clock.time
        loop(self)
        torch.vgpu.synchronize()
        return self.clock.time - start


def serial(toy: Toy) -> None:
    for _ in range(STEPS):
        toy.compute(toy.loaded(pinned=False).to("vgpu:0"))
        torch.vgpu.synchronize()


def queued(toy: Toy) -> None:
    """Without a wait in the step, the next batch is loaded while the GPU computes."""
    for _ in range(STEPS):
        toy.compute(toy.loaded(pinned=True).to("vgpu:0", non_blocking=True))


def pipelined(toy: Toy) -> None:
    """Load, copy on a stream of its own, and compute: three batches under way at once."""
    side, main = torch.vgpu.Stream(), torch.vgpu.current_stream()
    for _ in range(STEPS):
        host = toy.loaded(pinned=True)
        with torch.vgpu.stream(side):
            batch = host.to("vgpu:0", non_blocking=True)
        main.wait_stream(side)
        toy.compute(batch)
        batch.record_stream(main)


LOADS = [(1 * MS, 1), (1 * MS, 3), (60 * MS, 1), (20 * MS, 2)]


@pytest.mark.parametrize(("load", "products"), LOADS)
def test_serial_is_the_sum(clock: FakeClock, load: int, products: int) -> None:
    toy = Toy(clock, load, products)
    step = load + toy.copy_ns(pinned=False) + toy.compute_ns
    assert toy.seconds(serial) == pytest.approx(STEPS * step, rel=0.01)


@pytest.mark.parametrize(("load", "products"), LOADS)
def test_pipelined_is_the_longest(clock: FakeClock, load: int, products: int) -> None:
    toy = Toy(clock, load, products)
    stages = load, toy.copy_ns(pinned=True), toy.compute_ns
    expected = sum(stages) + (STEPS - 1) * max(stages)
    assert toy.seconds(pipelined) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("load", "products"), LOADS)
def test_on_one_stream_copies_come_in_turn(clock: FakeClock, load: int, products: int) -> None:
    toy = Toy(clock, load, products)
    device = toy.copy_ns(pinned=True) + toy.compute_ns
    expected = load + device + (STEPS - 1) * max(load, device)
    assert toy.seconds(queued) == pytest.approx(expected, rel=0.01)


def test_launches_return_at_once_until_the_queue_is_full(clock: FakeClock) -> None:
    x = torch.empty(1 << 20, device="vgpu:0")
    torch.vgpu.synchronize()
    start, waits = clock.time, 0
    depth = HARDWARE.host.queue_depth
    for n in range(depth + 10):
        before = clock.time
        x.add_(1)
        waits += clock.time > before
        if n < depth:
            assert clock.time == start
    assert waits == 10


def test_who_waits_and_who_does_not(clock: FakeClock, vgpu: Any) -> None:
    host = torch.empty(1 << 22)
    pinned = host.pin_memory()
    big = torch.empty(4096, 4096, device="vgpu:0")
    scalar = torch.zeros((), device="vgpu:0")

    def waits(action: Callable[[], object]) -> bool:
        vgpu.synchronize()
        big @ big
        before = clock.time
        action()
        return clock.time > before

    event = vgpu.Event()
    event.record()
    assert waits(lambda: host.to("vgpu:0"))
    assert waits(lambda: host.to("vgpu:0", non_blocking=True))
    assert waits(lambda: pinned.to("vgpu:0"))
    assert not waits(lambda: pinned.to("vgpu:0", non_blocking=True))
    assert not waits(lambda: big.to("cpu", non_blocking=True))
    assert not waits(lambda: scalar + 1)
    assert not waits(lambda: vgpu.synchronize(1))
    assert not waits(vgpu.Stream().synchronize)
    assert not waits(event.synchronize)
    for action in (
        scalar.item, scalar.cpu, scalar.tolist, lambda: float(scalar), lambda: bool(scalar > 0),
        vgpu.synchronize, torch.accelerator.synchronize, vgpu.current_stream().synchronize,
        lambda: scalar.numpy(force=True), lambda: big.to("cpu"),
    ):  # fmt: skip
        assert waits(action)


def test_events_tell_device_time_once_they_have_happened(clock: FakeClock, vgpu: Any) -> None:
    toy = Toy(clock, 0, products=2)
    start, end = vgpu.Event(enable_timing=True), vgpu.Event(enable_timing=True)
    start.record()
    toy.compute(toy.weights)
    end.record()
    assert start.query() and not end.query() and not vgpu.current_stream().query()
    with pytest.raises(RuntimeError, match=r"must be completed.*synchronize"):
        start.elapsed_time(end)
    end.synchronize()
    assert end.query() and vgpu.current_stream().query()
    assert start.elapsed_time(end) == pytest.approx(toy.compute_ns / 1e6, rel=0.01)
    virtual.enable(2, profile=PROFILE, pace="wall")
    with pytest.raises(RuntimeError, match="after lab.virtual.enable"):
        start.elapsed_time(end)


def test_a_copy_back_is_there_after_a_synchronize(clock: FakeClock, vgpu: Any) -> None:
    on_gpu = torch.ones(1 << 20, device="vgpu:0")
    host = torch.zeros(1 << 20).pin_memory()
    host.copy_(on_gpu, non_blocking=True)
    assert host.sum() == 0
    vgpu.synchronize()
    assert host.isnan().all()
    fresh = on_gpu.to("cpu", non_blocking=True)
    assert fresh.is_pinned() and not fresh.isnan().any()
    vgpu.current_stream().synchronize()
    assert fresh.isnan().all()
    assert torch.zeros(1 << 20).copy_(on_gpu).isnan().all()


def test_what_is_read_is_nan_and_said_once() -> None:
    x = torch.ones(3, device="vgpu:0")
    virtual.enable(2, profile=PROFILE, pace="wall")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert math.isnan(x[0].item()) and math.isnan(x.sum().cpu())
        assert math.isnan((x > 0).sum().item())
        assert not bool(x[0] > 3) and x.tolist()[0] != x.tolist()[0]
        assert (x > 0).cpu().tolist() == [False] * 3
    (warning,) = caught
    assert "compute no values" in str(warning.message)
    assert warning.filename == __file__


def test_a_training_loop_runs_and_reads_its_loss() -> None:
    model = nn.DataParallel(lab.models.create("resnet_small").to("vgpu:0"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [(torch.randn(3, 32, 32), n % 10) for n in range(16)]
    loss = nn.CrossEntropyLoss()
    total, correct = 0.0, 0.0
    for x, y in DataLoader(data, 8, pin_memory=True, num_workers=1):
        assert x.is_pinned() and y.is_pinned()
        x, y = x.to("vgpu:0", non_blocking=True), y.to("vgpu:0", non_blocking=True)
        optimizer.zero_grad()
        out = model(x)
        found = loss(out, y)
        found.backward()
        optimizer.step()
        total += found.item()
        correct += (out.argmax(1) == y).sum().item()
    assert math.isnan(total) and math.isnan(correct)


def test_the_watch_shows_what_the_host_did_and_where_the_gpu_idled(clock: FakeClock) -> None:
    toy = Toy(clock, 30 * MS, products=2)
    with lab.watch("serial", show=False) as w:
        for _ in range(3):
            with lab.span("data"):
                batch = toy.loaded(pinned=True)
            toy.compute(batch.to("vgpu:0", non_blocking=True))
            torch.vgpu.synchronize()
    trace = w.trace
    assert trace.source == "simulated"
    assert trace.hardware == f"{PROFILE} in real time, host measured"
    step = 30 * MS + toy.copy_ns(pinned=True) + toy.compute_ns
    assert trace.duration == pytest.approx(3 * step / 1e9, rel=0.01)
    assert trace.utilisation("GPU 0") == pytest.approx(toy.compute_ns / step, rel=0.01)
    loads = [s for s in trace.spans if s.name == "data"]
    assert [s.duration for s in loads] == pytest.approx([0.03] * 3)
    working = [s for s in trace.spans if s.device == "GPU 0"]
    assert not [s for s in working for load in loads if s.start < load.end and s.end > load.start]
    waits = [s.duration for s in trace.spans if s.name == "synchronize"]
    device = (toy.copy_ns(pinned=True) + toy.compute_ns) / 1e9
    assert waits == pytest.approx([device] * 3, rel=0.01)
    assert trace.peak_memory("GPU 0") >= toy.weights.nbytes


def test_spans_are_seen_only_when_they_have_happened(clock: FakeClock) -> None:
    from labutils.virtual.source import source

    toy = Toy(clock, 0, products=1)
    followed = source()
    followed.start()
    toy.compute(toy.weights)
    followed.poll()
    assert not followed.spans
    clock.time += toy.compute_ns + 1 * MS
    assert followed.poll() == pytest.approx((toy.compute_ns + 1 * MS) / 1e9)
    assert [s.name for s in followed.spans] == ["mm"]
    followed.stop()


def test_threads_wait_at_the_same_time() -> None:
    """On the real clock: two threads that wait for two devices do not wait for one another."""
    order = []

    def wait(index: int) -> None:
        big = torch.empty(8192, 8192, device=f"vgpu:{index}")
        big @ big
        order.append("issued")
        torch.vgpu.synchronize(index)
        order.append("done")

    threads = [threading.Thread(target=wait, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["issued", "issued", "done", "done"]


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"needs compute='phantom'"):
        virtual.enable(1, pace="wall", compute="real")
    with pytest.raises(ValueError, match=r"pace must be 'simulated' or 'wall', but got 'fast'"):
        virtual.enable(1, pace="fast")


def test_only_while_it_is_asked_for() -> None:
    assert virtual.is_wall() and virtual.is_phantom()
    virtual.enable(2)
    assert not virtual.is_wall() and not virtual.is_phantom()
    assert torch.ones(1, device="vgpu:0").item() == 1
    virtual.enable(2, compute="phantom")
    with pytest.raises(RuntimeError, match="needs values"):
        torch.ones(1, device="vgpu:0").item()
