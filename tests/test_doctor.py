"""Each bad case is made up and must be named, with a way out."""

from __future__ import annotations

import builtins
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_helpers import alive, wait_until

from labutils import doctor, hardware
from labutils.cli import main
from labutils.doctor import OK, PROBLEM, WARNING, Finding
from labutils.leftovers import leftovers

GIB = 1 << 30
Patch = pytest.MonkeyPatch


def only(check: Callable[[], Iterator[Finding]], what: str) -> Finding:
    (finding,) = [finding for finding in check() if finding.what == what]
    assert bool(finding.way_out) == (finding.level != OK)
    return finding


def test_this_machine_can_run_the_labs(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    shown = capsys.readouterr().out
    for what in ("Python", "PyTorch", "kernel", "loopback", "free port", "temporary files"):
        assert any(line.split()[:2][0] == OK and what in line for line in shown.splitlines()), shown
    assert code == int("problem" in shown)


def test_old_python(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    finding = only(doctor.check_python, "Python")
    assert (finding.level, finding.text) == (PROBLEM, "3.9.18")


def test_no_torch(monkeypatch: Patch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError("libtorch.so: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    finding = only(doctor.check_torch, "PyTorch")
    assert finding.level == PROBLEM
    assert "libtorch.so" in finding.text


def test_untried_torch(monkeypatch: Patch) -> None:
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert only(doctor.check_torch, "PyTorch").level == WARNING


@pytest.mark.parametrize(
    ("cuda", "text"), [(None, "PyTorch's CPU build"), ("13.0", "PyTorch sees no GPU")]
)
def test_a_driver_that_pytorch_does_not_use(
    monkeypatch: Patch, cuda: str | None, text: str
) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("torch.version.cuda", cuda)
    finding = only(doctor.check_gpus, "GPUs")
    assert finding.level == WARNING
    assert text in finding.text


def test_several_gpus_without_nccl(monkeypatch: Patch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (hardware.Gpu("T4", 15 * GIB, 40),) * 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert only(doctor.check_gpus, "GPUs").text == "T4, T4"
    assert only(doctor.check_gpus, "collectives").level == WARNING
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert only(doctor.check_gpus, "collectives").level == OK


@pytest.mark.parametrize(
    ("package", "version"),
    [("ipywidgets", "7.8.1"), ("jupyterlab", "3.6.8"), ("anywidget", None), ("jupyterlab", None)],
)
def test_front_end_that_does_not_fit(monkeypatch: Patch, package: str, version: str | None) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: version if n == package else real(n))
    finding = only(doctor.check_front_end, "JupyterLab")
    assert finding.level == WARNING
    assert f"{package} {version or 'missing'}" in finding.text


def kernelspec(folder: Path, command: str) -> None:
    folder = folder / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {
        "argv": [command, "-m", "ipykernel_launcher"],
        "display_name": "P",
        "language": "python",
    }
    (folder / "kernel.json").write_text(json.dumps(spec))


def test_kernel_of_another_python(monkeypatch: Patch, tmp_path: Path) -> None:
    kernelspec(tmp_path, "/opt/other/bin/python")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    finding = only(doctor.check_kernel, "kernel")
    assert finding.level == WARNING
    assert "/opt/other/bin/python" in finding.text
    assert sys.executable in finding.way_out


def test_no_kernel(monkeypatch: Patch) -> None:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    def missing(self: KernelSpecManager, name: str) -> None:
        raise NoSuchKernel(name)

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", missing)
    assert only(doctor.check_kernel, "kernel").level == PROBLEM


@pytest.mark.parametrize(
    ("size", "level"),
    [(64 << 20, PROBLEM), (512 << 20, WARNING), (2 * GIB, OK), (None, OK)],
)
def test_shared_memory(monkeypatch: Patch, size: int | None, level: str) -> None:
    monkeypatch.setattr(hardware, "shared_memory", lambda free=False: size)
    assert only(doctor.check_shared_memory, "/dev/shm").level == level


def test_shared_memory_that_is_full(monkeypatch: Patch) -> None:
    monkeypatch.setattr(hardware, "shared_memory", lambda free=False: 10 << 20 if free else GIB)
    finding = only(doctor.check_shared_memory, "/dev/shm")
    assert (finding.level, finding.text) == (WARNING, "10 of 1024 MiB free")


RANK = """
import os, subprocess, sys
variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                        env={**os.environ, **variables}, **quiet)
print(rank.pid)
"""


def test_a_rank_that_an_earlier_run_has_left() -> None:
    """Its parent ends without it, as an agent that is killed does."""
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=True)
    rank = psutil.Process(int(done.stdout))
    try:
        if rank.ppid() != 1:
            pytest.skip(f"orphans become children of process {rank.ppid()} here, not of the first")
        finding = only(doctor.check_leftovers, "leftover ranks")
        assert finding.level == WARNING
        assert str(rank.pid) in finding.text
        assert str(rank.pid) in finding.way_out
    finally:
        rank.kill()
    assert wait_until(lambda: not alive(rank.pid), 10)
    assert str(rank.pid) not in only(doctor.check_leftovers, "leftover ranks").text


def test_a_rank_that_is_looked_after_is_no_leftover() -> None:
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    rank = subprocess.Popen(
        [sys.executable, "-c", "import labutils.guard, time; time.sleep(300)"], env=variables
    )
    try:
        assert rank.pid not in [process.pid for process in leftovers()]
    finally:
        rank.kill()
        rank.wait()


def test_extensions_of_jupyterlab(monkeypatch: Patch, tmp_path: Path) -> None:
    assert only(doctor.check_front_end, "JupyterLab").level == OK
    settings = tmp_path / "labconfig" / "page_config.json"
    settings.parent.mkdir()
    settings.write_text('{"disabledExtensions": {"anywidget": true}}')
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    finding = only(doctor.check_front_end, "JupyterLab")
    assert finding.level == WARNING
    assert "anywidget is disabled" in finding.text
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *words: [str(tmp_path)])
    finding = only(doctor.check_front_end, "JupyterLab")
    assert "@jupyter-widgets/jupyterlab-manager is missing" in finding.text


def test_small_machine(monkeypatch: Patch) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    finding = only(doctor.check_size, "cores")
    assert (finding.level, finding.text) == (WARNING, "1 of 64, by affinity or cgroup")
    for memory, level in ((GIB, PROBLEM), (2 * GIB, WARNING), (8 * GIB, OK)):
        monkeypatch.setattr(hardware, "memory_limit", lambda memory=memory: memory)
        assert only(doctor.check_size, "memory").level == level


def test_host_name_that_does_not_resolve(monkeypatch: Patch) -> None:
    def fail(*query: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    finding = only(doctor.check_host_name, "host name")
    assert finding.level == WARNING
    assert "`127.0.0.1 node-7`" in finding.way_out


@pytest.mark.parametrize(
    ("address", "only"), [("127.0.1.1", True), ("::1", True), ("10.0.0.7", False)]
)
def test_host_name_that_other_machines_cannot_reach(
    address: str, only: bool, monkeypatch: Patch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *query, **options: found)
    (finding,) = doctor.check_host_name()
    assert finding.level == OK and address in finding.text
    assert ("cannot reach" in finding.text) == only


def test_loopback_that_does_not_answer(monkeypatch: Patch) -> None:
    def refuse(*address: object, **options: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert only(doctor.check_loopback, "loopback").level == PROBLEM
    monkeypatch.setattr(socket, "create_server", refuse)
    assert only(doctor.check_loopback, "loopback").level == PROBLEM


def test_nowhere_to_write(monkeypatch: Patch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("LABUTILS_DATA", str(file / "data"))
    finding = only(doctor.check_write_access, "progress")
    assert finding.level == WARNING
    assert "LABUTILS_DATA" in finding.way_out
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(file))
    finding = only(doctor.check_write_access, "temporary files")
    assert finding.level == PROBLEM
    assert "TMPDIR" in finding.way_out


def test_a_check_that_breaks_is_reported_and_the_rest_goes_on(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_front_door() -> Iterator[Finding]:
        raise RuntimeError("no key")
        yield

    monkeypatch.setattr(doctor, "CHECKS", [check_front_door, doctor.check_python])
    assert main(["doctor", "--json"]) == 1
    broken, python = json.loads(capsys.readouterr().out)
    assert broken["what"] == "front door"
    assert broken["level"] == PROBLEM
    assert "no key" in broken["text"]
    assert python["level"] == OK
