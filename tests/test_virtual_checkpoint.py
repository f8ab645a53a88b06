"""``torch.save`` and ``torch.load``: one file format for virtual, real and no GPUs."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from labutils import virtual
from tests.virtual_gpus import gpus


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with gpus(4):
        yield


def saved(value: Any, **options: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    buffer.seek(0)
    return buffer


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("vgpu:1")


@pytest.mark.parametrize(
    ("where", "device"),
    [
        (None, "vgpu:1"),
        ("cpu", "cpu"),
        ("vgpu:3", "vgpu:3"),
        ("vgpu", "vgpu:0"),
        ({"vgpu:1": "vgpu:2"}, "vgpu:2"),
        ({"vgpu:1": "cpu"}, "cpu"),
        (lambda storage, location: storage, "cpu"),
        ("meta", "meta"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_map_location(where: Any, device: str, whole: bool) -> None:
    net = model()
    found = torch.load(
        saved(net if whole else net.state_dict()), map_location=where, weights_only=not whole
    )
    tensors = found.state_dict() if whole else found
    for name, tensor in net.state_dict().items():
        assert str(tensors[name].device) == device
        if device != "meta":
            assert torch.equal(tensors[name].cpu(), tensor.cpu())


def test_shared_storages_stay_shared() -> None:
    x = torch.randn(4, 4, device="vgpu:1")
    whole, row, turned = torch.load(saved([x, x[1], x.t()]))
    assert whole.block is row.block is turned.block
    assert torch.equal(turned, x.t())
    whole.zero_()
    assert float(row.abs().sum()) == 0
    assert torch.get_device_module("vgpu").memory_allocated(1) == 2 * 64


@pytest.mark.parametrize("zipped", [True, False])
def test_both_file_formats(zipped: bool) -> None:
    x = torch.randn(5, device="vgpu:2")[1:]
    made = torch.load(saved(x, _use_new_zipfile_serialization=zipped))
    assert torch.equal(made, x)


def test_from_a_file_of_the_cpu_to_a_virtual_gpu() -> None:
    x = torch.randn(3)
    made = torch.load(saved(x), map_location="vgpu:2")
    assert made.device.index == 2
    assert torch.equal(made.cpu(), x)


def test_a_device_that_is_not_there() -> None:
    file = saved(torch.zeros(2, device="vgpu:3"))
    virtual.enable(1)
    with pytest.raises(RuntimeError, match=r"vgpu:3.*1 virtual GPU.*map_location='cpu'"):
        torch.load(file)


def test_optimizer_state() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(3, 3, device="vgpu:1")).sum().backward()
    optimizer.step()
    state = torch.load(saved(optimizer.state_dict()))["state"][0]
    assert (str(state["exp_avg"].device), state["step"].device.type) == ("vgpu:1", "cpu")
    again = torch.optim.Adam(model().to("vgpu:2").parameters())
    again.load_state_dict(torch.load(saved(optimizer.state_dict())))
    assert again.state_dict()["state"][0]["exp_avg"].device.index == 2


def test_pickle() -> None:
    net = pickle.loads(pickle.dumps(model()))
    assert isinstance(net[0].weight, nn.Parameter)
    assert net[0].weight.device.index == 1


def test_a_fresh_process_without_labutils_reads_it(tmp_path: Path) -> None:
    net = model()
    file = tmp_path / "model.pt"
    torch.save(net.state_dict(), file)
    code = (
        f"import sys, torch; d = torch.load({str(file)!r}, map_location='cpu'); "
        "assert 'labutils' not in sys.modules; print(float(d['0.weight'].double().sum()))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert float(shown) == pytest.approx(float(net[0].weight.cpu().double().sum()))


def test_phantom_tensors_have_nothing_to_save() -> None:
    virtual.enable(4, compute="phantom")
    with pytest.raises(RuntimeError, match=r"torch\.save needs values"):
        torch.save(torch.zeros(2, device="vgpu:0"), io.BytesIO())
