"""The log of operations: complete, bounded, with the right thread, phase, bytes and FLOPs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labutils import models
from labutils.virtual.record import Entry, Recorder, thread_order
from tests.virtual_gpus import gpus, recorded

DEV = "vgpu:0"


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(2) as module:
        yield module


def line(what: str = "kernel", number: int = 0) -> Entry:
    return Entry(what, "main", number, 0, "")


def test_bounded_and_counts_what_is_lost() -> None:
    recorder = Recorder(capacity=10)
    for number in range(25):
        assert recorder.append(line(number=number)) == number
    assert len(recorder.log) == 10
    entries, lost = recorder.since(5)
    assert ([e.device for e in entries], lost) == (list(range(15, 25)), 10)
    assert recorder.since(20)[1] == 0
    assert recorder.since(25) == ([], 0)


def test_threads_are_in_natural_order() -> None:
    names = ["Thread-10 (run)", "Thread-9 (run)", "main", "Thread-2"]
    assert sorted(names, key=thread_order) == [
        "Thread-2", "Thread-9 (run)", "Thread-10 (run)", "main",
    ]  # fmt: skip


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "resnet": lambda: (models.create("resnet_small"), (torch.randn(2, 3, 32, 32),)),
    "mlp": lambda: (models.create("mlp"), (torch.randn(3, 784),)),
    "attention": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
        (torch.randn(2, 5, 16),),
    ),
    "transposed": lambda: (nn.ConvTranspose2d(3, 4, 3, stride=2), (torch.randn(2, 3, 5, 5),)),
    "grouped": lambda: (nn.Conv2d(4, 8, 3, groups=2), (torch.randn(2, 4, 6, 6),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_pytorchs_counter(name: str) -> None:
    model, inputs = MODELS[name]()
    moved = tuple(x.to(DEV).requires_grad_() for x in inputs)
    inputs = tuple(x.to("meta").requires_grad_() for x in inputs)
    with FlopCounterMode(display=False) as counter:
        model.to("meta")(*inputs).sum().backward()
    model = MODELS[name]()[0].to(DEV)
    with recorded() as entries:
        model(*moved).sum().backward()
    ours = sum(e.kernel.flops for e in entries if e.kernel)
    theirs = counter.get_total_flops()
    if name == "attention":  # on meta the backward of attention is made of plain products
        assert ours == pytest.approx(theirs, rel=0.1)
    else:
        assert ours == theirs > 0


# What a call on a of shape (4, 8) and b of shape (8, 2) reads and writes, in elements of 4 bytes.
BYTES: dict[str, tuple[Callable[[Any, Any], Any], int, int]] = {
    "mm": (lambda a, b: a @ b, 32 + 16, 8),
    "add": (lambda a, b: a + a, 64, 32),
    "relu": (lambda a, b: a.relu(), 32, 32),
    "add_": (lambda a, b: a.add_(1), 32, 32),
    "zero_": (lambda a, b: a.zero_(), 0, 32),
    "sum": (lambda a, b: a.sum(), 32, 1),
    "copy_": (lambda a, b: a.copy_(a.t().reshape(4, 8)), 32, 32),
    "embedding": (lambda a, b: F.embedding(torch.tensor([1], device=DEV), a), 16, 8),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_by_hand(name: str) -> None:
    call, read, written = BYTES[name]
    a, b = torch.randn(4, 8, device=DEV), torch.randn(8, 2, device=DEV)
    with recorded() as entries:
        call(a, b)
    kernel = [e.kernel for e in entries if e.kernel and e.kernel.name == name][-1]
    assert (kernel.bytes_read, kernel.bytes_written) == (4 * read, 4 * written)


def test_views_cost_no_bytes_on_the_device() -> None:
    x = torch.randn(4, 8, device=DEV)
    with recorded() as entries:
        x.t().view(8, 4)[1:]
    assert {e.kernel.kind for e in entries if e.kernel} == {"view"}


def test_equal_calls_share_one_kernel() -> None:
    x = torch.randn(4, 8, device=DEV)
    with recorded() as entries:
        x + 1
        x + 2
    first, second = [e.kernel for e in entries if e.what == "kernel"]
    assert first is second


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_phases_and_threads_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEV)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(3, 4, device=DEV)
    with recorded() as entries:
        step(model, optimizer, x)
    where = defaultdict(set)
    for entry in entries:
        if entry.what == "kernel" and entry.kernel and entry.kernel.kind != "view":
            where[entry.phase].add(entry.thread)
    assert where["backward"] == {"autograd 0"}
    assert where["forward"] == where["optimizer"] == {"main"}
    names = [e.kernel.name for e in entries if e.phase == "backward" and e.kernel]
    assert "threshold_backward" in names
    assert [(e.what, e.ref) for e in entries if e.what in ("fork", "join")] == [
        ("fork", "autograd 0"),
        ("join", "autograd 0"),
    ]


def test_backward_over_two_devices_keeps_its_order() -> None:
    first, second = nn.Linear(3, 3).to("vgpu:0"), nn.Linear(3, 3).to("vgpu:1")
    out = second(first(torch.randn(2, 3, device="vgpu:0")).to("vgpu:1")).sum()
    with recorded() as entries:
        out.backward()
    threads = [e.thread for e in entries if e.what == "kernel"]
    assert threads.index("autograd 1") < threads.index("autograd 0")
    after = [e for e in entries if e.what == "after"]
    assert [e.thread for e in after] == ["autograd 0"]


def test_a_thread_is_forked_and_joined() -> None:
    def work() -> None:
        torch.zeros(3, device=DEV).add_(1)

    with recorded() as entries:
        thread = threading.Thread(target=work, name="helper")
        thread.start()
        thread.join()
        torch.zeros(1, device=DEV)
    lines = [(e.what, e.thread, e.ref) for e in entries if e.what != "memory"]
    forked, joined = (
        lines.index(("fork", "main", "helper")),
        lines.index(("join", "main", "helper")),
    )
    work = [i for i, line in enumerate(lines) if line[:2] == ("kernel", "helper")]
    after = [i for i, line in enumerate(lines) if line[:2] == ("kernel", "main")]
    assert work and after
    assert forked < min(work) and max(work) < joined < min(after)


def signature(entries: list[Entry]) -> dict[str, list[Any]]:
    """Per thread (named by order of their forks), what it did."""
    names: dict[str, str] = {}
    found: dict[str, list[Any]] = defaultdict(list)
    for e in entries:
        if e.what in ("fork", "join", "after", "memory"):
            continue
        name = e.thread if not e.thread.startswith("Thread") else f"worker {e.device}"
        names[e.thread] = name
        kernel = e.kernel and (e.kernel.name, e.kernel.flops, e.kernel.bytes)
        found[name].append((e.what, e.device, e.phase, kernel))
    return found


def test_the_same_program_gives_the_same_log() -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(DEV))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 4)
    logs = []
    for _ in range(3):
        with recorded() as entries:
            step(model, optimizer, x)
        logs.append(signature(entries))
    assert logs[1] == logs[2]
    assert {"main", "worker 0", "worker 1", "autograd 0", "autograd 1"} <= set(logs[1])


def test_memory_entries_add_up_to_the_ledger(vgpu: Any) -> None:
    from labutils.virtual import journal

    journal.sample_memory(0)
    before = vgpu.memory_allocated(0)
    with recorded() as entries:
        kept = [torch.zeros(n, device=DEV) for n in (10, 20, 30)]
        del kept[1]
        journal.sample_memory(0)
    changes = [e.ref for e in entries if e.what == "memory"]
    assert sum(changes) == vgpu.memory_allocated(0) - before == 160


@pytest.mark.parametrize(
    ("action", "waits"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x[x > 0], True),
        (lambda x: x + 1, False),
    ],
)
def test_the_host_waits_where_it_reads_a_value(action: Any, waits: bool) -> None:
    x = torch.ones(3, device=DEV)
    with recorded() as entries:
        action(x)
    found = any(e.what == "sync" or (e.what == "copy" and e.ref.blocking) for e in entries)
    assert found == waits
