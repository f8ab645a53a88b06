"""Streams and events: what is current, and what is written to the log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.virtual_gpus import gpus, recorded


@pytest.fixture(autouse=True)
def vgpu() -> Iterator[Any]:
    with gpus(3) as module:
        yield module


def test_current_stream_per_device_and_thread(vgpu: Any) -> None:
    default, side = vgpu.current_stream(1), vgpu.Stream(1)
    assert default.stream_id == vgpu.default_stream(1).stream_id == 0
    with vgpu.stream(side):
        assert (vgpu.current_device(), vgpu.current_stream(1)) == (1, side)
        assert vgpu.current_stream(0).stream_id == 0
        seen: list[Any] = []
        other = threading.Thread(target=lambda: seen.append(vgpu.current_stream(1).stream_id))
        other.start()
        other.join()
        assert seen == [0]
    assert (vgpu.current_device(), vgpu.current_stream(1).stream_id) == (0, 0)
    with vgpu.stream(None), vgpu.device(None):
        assert vgpu.current_device() == 0


def test_kernels_run_on_the_current_stream(vgpu: Any) -> None:
    side = vgpu.Stream(1)
    x = torch.zeros(4, device="vgpu:1")
    with recorded() as entries:
        x.add_(1)
        with side:
            x.add_(1)
        x.add_(1)
    kernels = [(e.device, e.stream) for e in entries if e.what == "kernel"]
    assert kernels == [(1, 0), (1, side.stream_id), (1, 0)]


def test_waiting_is_recorded(vgpu: Any) -> None:
    side, event = vgpu.Stream(1), vgpu.Event()
    vgpu.set_device(1)
    with recorded() as entries:
        event.wait(side)  # not recorded yet: nobody waits
        event.record()
        event.wait(side)
        side.wait_stream(vgpu.current_stream())
        side.synchronize()
        event.synchronize()
        vgpu.synchronize()
    lines = [(e.what, e.device, e.stream, e.ref) for e in entries]
    second = lines[2][3]
    assert second != event.number
    assert lines == [
        ("record", 1, 0, event.number),
        ("wait", 1, side.stream_id, event.number),
        ("record", 1, 0, second),
        ("wait", 1, side.stream_id, second),
        ("sync", 1, side.stream_id, ("stream", side.stream_id)),
        ("sync", 1, 0, ("event", event.number)),
        ("sync", 1, 0, None),
    ]
    assert side.query() and event.query()


def test_copies_between_devices_wait_for_the_source_stream(vgpu: Any) -> None:
    source, target = vgpu.Stream(0), vgpu.Stream(1)
    x = torch.zeros(4, device="vgpu:0")
    with recorded() as entries, source, target:
        x.to("vgpu:1")
    (copy,) = [e for e in entries if e.what == "copy"]
    assert (copy.device, copy.stream, copy.ref.source_stream) == (
        1,
        target.stream_id,
        source.stream_id,
    )


@pytest.mark.parametrize("device", [3, -2, "vgpu:7", "cpu"])
def test_devices_that_do_not_exist(vgpu: Any, device: Any) -> None:
    with pytest.raises(ValueError, match=r"vgpu|there are 3 virtual GPUs"):
        vgpu.set_device(device)
