"""``enable`` and ``torch.vgpu``: what is there, what it is called, and bad input."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import pytest
import torch

from labutils import virtual
from labutils.timing import profiles
from tests.virtual_gpus import gpus


@pytest.mark.parametrize("count", [0, -1, 65, "4", 2.0, True, None])
def test_bad_numbers(count: Any) -> None:
    with pytest.raises(ValueError, match=r"virtual GPUs"):
        virtual.enable(count)


def test_bad_profile_and_compute() -> None:
    with pytest.raises(ValueError, match="A100-SXM4-80GB"):
        virtual.enable(1, profile="A100-SXM4-81GB")
    with pytest.raises(ValueError, match="'real' or 'phantom'"):
        virtual.enable(1, compute="fast")


def test_enable_returns_the_devices() -> None:
    with gpus(64):
        devices = virtual.enable(3)
        assert [str(d) for d in devices] == ["vgpu:0", "vgpu:1", "vgpu:2"]
        assert virtual.is_enabled()
        virtual.disable()
        assert not virtual.is_enabled()


def test_enabling_again_keeps_tensors_and_changes_the_profile() -> None:
    with gpus(2) as vgpu:
        kept = torch.ones(5, device="vgpu:1")
        virtual.enable(1, profile="T4")
        t4 = profiles.load("T4").gpu
        assert vgpu.device_count() == 1
        assert vgpu.get_device_properties(0).total_memory == t4.memory_bytes
        assert t4.name in vgpu.get_device_name(0)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(1, device="vgpu:1")
        assert float(kept.sum()) == 5.0
        virtual.enable(4)
        assert torch.zeros(1, device="vgpu:3").device.index == 3
        assert vgpu.memory_allocated(1) == 20
        del kept


def test_current_device() -> None:
    with gpus(3) as vgpu:
        vgpu.set_device("vgpu:2")
        assert vgpu.current_device() == 2
        with vgpu.device(torch.device("vgpu:1")):
            assert vgpu.current_device() == 1
        assert vgpu.current_device() == 2
        with pytest.raises(ValueError, match="3 virtual GPUs"):
            vgpu.memory_allocated(3)
        assert torch.accelerator.current_accelerator() == torch.device("vgpu")


def test_names_mirror_cuda() -> None:
    with gpus(1) as vgpu:
        names = (
            "device_count current_device set_device device synchronize memory_allocated "
            "max_memory_allocated memory_reserved reset_peak_memory_stats memory_stats "
            "mem_get_info get_device_properties Stream Event stream current_stream empty_cache "
            "OutOfMemoryError is_available manual_seed manual_seed_all get_device_name "
            "get_device_capability can_device_access_peer init ipc_collect device_of seed seed_all "
            "memory_summary reset_max_memory_allocated initial_seed get_rng_state_all "
            "set_rng_state_all is_bf16_supported is_tf32_supported is_current_stream_capturing "
            "StreamContext default_stream set_stream max_memory_reserved is_initialized"
        )
        for name in names.split():
            assert hasattr(torch.cuda, name)
            assert inspect.getdoc(getattr(vgpu, name)), name
        assert all(hasattr(vgpu, name) for name in vgpu.__all__)
        assert vgpu.OutOfMemoryError is torch.OutOfMemoryError
        assert vgpu.is_available()


def test_a_parameter_that_is_held_on_to_cannot_move_and_that_is_said() -> None:
    layer = torch.nn.Linear(3, 3)
    held = weakref.ref(layer.weight)
    with gpus(1):  # noqa: SIM117 - the error must be gone before the bytes are counted
        with pytest.raises(RuntimeError, match="Linear.weight cannot move .* while something"):
            layer.to("vgpu:0")
    assert held() is not None


@pytest.mark.parametrize(
    ("profile", "capability"), [("V100-SXM2", (7, 0)), ("DGX-A100", (8, 0)), ("RTX-4090", (8, 9))]
)
def test_capabilities(profile: str, capability: tuple[int, int]) -> None:
    with gpus(2, profile=profile) as vgpu:
        assert vgpu.get_device_capability(1) == capability
        assert vgpu.is_tf32_supported() == (capability >= (8, 0))
        assert vgpu.is_bf16_supported() and vgpu.can_device_access_peer(0, 1)


def test_every_profile_has_a_capability() -> None:
    for profile in profiles.names():
        virtual.enable(1, profile=profile)
        assert torch.get_device_module("vgpu").get_device_capability() > (5, 0), profile


def test_summary_of_memory() -> None:
    with gpus(2) as vgpu:
        kept = torch.ones(3 << 20, dtype=torch.uint8, device="vgpu:1")
        text = vgpu.memory_summary("vgpu:1")
        assert "vgpu:1" in text and text.count("3.00 MiB") >= 2
        assert "storages" in text and "storages" not in vgpu.memory_summary(1, abbreviated=True)
        with vgpu.device_of(kept):
            assert vgpu.current_device() == 1
        with vgpu.device_of(torch.ones(1)):
            assert vgpu.current_device() == 0
        del kept


def test_random_numbers_can_be_repeated() -> None:
    with gpus(2) as vgpu:
        states = vgpu.get_rng_state_all()
        first = torch.rand(3, device="vgpu:1").tolist()
        vgpu.set_rng_state_all(states)
        assert torch.rand(3, device="vgpu:0").tolist() == first


def test_what_only_cuda_has_is_said() -> None:
    with gpus(1) as vgpu:
        with pytest.raises(AttributeError, match="has no 'CUDAGraph': of torch.cuda"):
            vgpu.CUDAGraph  # noqa: B018
        assert not hasattr(vgpu, "no_such_thing")
