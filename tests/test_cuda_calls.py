"""What labutils asks of CUDA, call by call, answered by a fake (see fake_cuda.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import GIB, NAME, FakeCuda

from labutils import devices, hardware, telemetry
from labutils.clocks import CudaClock
from labutils.cluster import facts
from labutils.launch import group
from labutils.launch.world import World
from labutils.loading import measure as loading
from labutils.telemetry import Recorder
from labutils.timing import measure

LABUTILS = Path(telemetry.__file__).parent
CUDA = torch.device("cuda", 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_the_fake_answers_all_that_is_asked() -> None:
    """A new call to CUDA needs an answer there, and a test here."""
    asked = set()
    for path in LABUTILS.rglob("*.py"):
        if path.relative_to(LABUTILS).parts[0] in ("virtual", "inspection"):
            continue  # these stand in for torch.cuda, and name all of it
        code = re.sub(r'"""(?s:.)*?"""|#.*|``[^`]*``', "", path.read_text(encoding="utf-8"))
        asked |= set(re.findall(r"(?<![\"'\w.])torch\.cuda\.(\w+)", code))
    by_name = {"memory_allocated"}  # telemetry asks the device's module, whatever its type
    assert asked | by_name == FakeCuda().answers.keys()


# -- a rank and its GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize(("local_rank", "gpus", "index"), [(1, 2, 1), (2, 2, 0), (1, 1, 0)])
def test_ranks_share_gpus_that_are_too_few(
    fake: FakeCuda, local_rank: int, gpus: int, index: int
) -> None:
    assert group.rank_device(local_rank, gpus, {}) == torch.device("cuda", index)
    assert fake.current == [index]


def test_nccl_where_each_rank_has_a_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("sys.platform", "linux")
    assert [World(ranks, gpus=2).backend for ranks in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert group.BOTH["nccl"] == "cpu:gloo,cuda:nccl"


def test_real_gpus_are_used_and_described(fake: FakeCuda) -> None:
    found = devices.gpus(2)
    assert found == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert devices.describe(found) == (
        f"2 real GPUs ({NAME}): values, memory and time are measured"
    )
    assert [gpu.memory_bytes for gpu in hardware.gpus()] == [16 * GIB] * 2
    assert facts._nccl(torch) == "2.28.3"


# -- telemetry in a rank ---------------------------------------------------------------------------


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def spans(path: Path) -> list[Any]:
    return [line for line in lines(path) if isinstance(line, list) and len(line) == 7]


def test_a_span_is_written_once_the_stream_has_passed_it(fake: FakeCuda, tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "r"), 1, CUDA, 0, 0)
    begun = recorder.clock.base_ns
    fake.delay_ms = 2.0  # the GPU is that far behind
    token = recorder.begin("forward", "forward")
    fake.now_ms += 5
    recorder.end(token)
    recorder.flush()
    assert spans(tmp_path / "r") == []
    fake.now_ms += 2
    recorder.flush()
    ((start, end, *names),) = spans(tmp_path / "r")
    assert (start - begun, end - begun) == (2_000_000, 7_000_000)
    assert names[:2] == ["forward", "forward"]
    recorder.close()


def test_what_is_pending_at_the_end_is_waited_for(fake: FakeCuda, tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "r"), 1, CUDA, 0, 0)
    fake.waited.clear()
    fake.delay_ms = 3.0
    recorder.end(recorder.begin("step", "span"))
    recorder.close()
    assert len(fake.waited) == 1
    assert [line[2] for line in spans(tmp_path / "r")] == ["step"]
    head, *rest = lines(tmp_path / "r")
    assert (head["device"], head["hardware"], head["capacity"]) == ("GPU 1", NAME, 16 * GIB)
    samples = [line for line in rest if isinstance(line, list) and len(line) == 2]
    assert samples and all(held % GIB == 0 and held for _, held in samples)


def test_the_clock_stays_exact_over_hours(fake: FakeCuda) -> None:
    """Event times are float32 milliseconds: after hours they would be coarse."""
    clock = CudaClock()
    begun = clock.base_ns
    for _ in range(5000):
        fake.now_ms += 1500.0
        assert clock.nanoseconds(clock.mark()) - begun == round(fake.now_ms * 1e6)
    assert clock.base.at_ms == fake.now_ms
    assert clock.nanoseconds(17) == 17  # the host's own time


# -- measuring the hardware ------------------------------------------------------------------------


def test_a_measured_stretch_ends_when_the_gpu_is_done(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = measure.Clock(CUDA, 0.01)
    clock._run(lambda: None, 3)
    assert fake.waited == [CUDA, CUDA]
    assert measure._identity(CUDA, 2) == {"name": NAME, "memory": 16 * GIB, "processors": 108}


def test_ranks_that_measure_take_a_gpu_each(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(measure.dist, name, lambda *a, name=name, **k: calls.append((name, *a)))
    monkeypatch.setattr(measure, "computing", lambda device, *_: {"kind": device.type})
    monkeypatch.setattr(measure, "_all_reduce", lambda *_: [])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    measure._rank(1, 2, 1, 0.1, str(tmp_path))
    assert fake.current == [CUDA]
    assert calls[0] == ("init_process_group", "nccl")
    assert calls[-1] == ("destroy_process_group",)
    with pytest.raises(ValueError, match="This machine has 2 GPUs, so ranks cannot be 3"):
        measure.measure(ranks=3)


def test_random_numbers_of_the_gpus_are_kept_as_well(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    class Fork:
        def __init__(self, devices: list[int]) -> None:
            kept.append(devices)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.random, "fork_rng", Fork)
    with loading.undisturbed():
        pass
    assert kept == [[0, 1]]
