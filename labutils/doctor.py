"""``labutils doctor``: is this machine ready for the labs, and if not, what to do.

Each check is a function that yields :class:`Finding` objects; :data:`CHECKS` lists them.  A check
that breaks is itself reported, so the others still speak.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from labutils import hardware
from labutils.cluster.address import is_loopback

OK, WARNING, PROBLEM = "ok", "warning", "problem"
OLDEST_PYTHON = (3, 10)
TORCH_TRIED = ("2.13",)
FRONT_END = {"jupyterlab": 4, "ipywidgets": 8, "jupyterlab_widgets": 3, "anywidget": 0}
"""Packages that the live view needs, with the major version that fits."""
EXTENSIONS = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
"""Their halves in JupyterLab."""

_MIB, _GIB = 1 << 20, 1 << 30
SHM_PROBLEM, SHM_WARNING = 256 * _MIB, _GIB
"""Bytes of ``/dev/shm`` below which DataLoader workers fail, or may."""
_INSTALL = "run `make setup`, or pip install --constraint constraints.txt --editable ."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    level: str
    """``ok``, ``warning`` (some labs suffer) or ``problem`` (they will not run)."""
    text: str
    way_out: str = ""


def check_python() -> Iterator[Finding]:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding("Python", PROBLEM, version, "the labs need Python 3.10 or newer")
    else:
        yield Finding("Python", OK, f"{version} in {sys.prefix}")


def check_torch() -> Iterator[Finding]:
    """PyTorch's version, and whether its build suits the machine."""
    try:
        import torch
    except ImportError as error:
        yield Finding("PyTorch", PROBLEM, f"does not import: {error}", _INSTALL)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    text = f"{torch.__version__}, {build}"
    if not str(torch.__version__).startswith(TORCH_TRIED):
        tried = ", ".join(TORCH_TRIED)
        yield Finding("PyTorch", WARNING, text, f"virtual GPUs were tried with {tried}: {_INSTALL}")
    else:
        yield Finding("PyTorch", OK, text)


def check_gpus() -> Iterator[Finding]:
    """GPUs as PyTorch sees them, and NCCL for talk between them."""
    import torch
    import torch.distributed as dist

    found = hardware.gpus()
    driver = shutil.which("nvidia-smi") is not None
    if found:
        yield Finding("GPUs", OK, ", ".join(gpu.name for gpu in found))
    elif driver and not torch.version.cuda:
        way_out = "for real GPUs install PyTorch's CUDA build"
        yield Finding("GPUs", WARNING, "an NVIDIA driver, but PyTorch's CPU build", way_out)
    elif driver:
        way_out = "see whether nvidia-smi lists GPUs and CUDA_VISIBLE_DEVICES hides none"
        yield Finding("GPUs", WARNING, "an NVIDIA driver, but PyTorch sees no GPU", way_out)
    else:
        yield Finding("GPUs", OK, "none: virtual GPUs take their place")
    if not dist.is_available():
        yield Finding("collectives", PROBLEM, "PyTorch without torch.distributed", _INSTALL)
    elif len(found) > 1 and not dist.is_nccl_available():
        yield Finding("collectives", WARNING, "no NCCL: ranks talk over gloo, far slower", _INSTALL)
    else:
        yield Finding("collectives", OK, "nccl and gloo" if len(found) > 1 else "gloo")


def check_front_end() -> Iterator[Finding]:
    """JupyterLab and the widget packages, which must fit each other."""
    missing = _missing_extensions()
    versions = {name: _version(name) for name in FRONT_END}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    wrong = [name for name, version in versions.items() if not _fits(name, version)]
    if wrong:
        needs = ", ".join(f"{name} {FRONT_END[name]}" for name in wrong if FRONT_END[name])
        way_out = (f"they fit with {needs}: " if needs else "") + _INSTALL
        yield Finding("JupyterLab", WARNING, f"no live view, only figures: {text}", way_out)
    elif missing:
        text = f"no live view, only figures: {', '.join(missing)}"
        way_out = f"enable what is disabled (`jupyter labextension list` tells), or {_INSTALL}"
        yield Finding("JupyterLab", WARNING, text, way_out)
    else:
        yield Finding("JupyterLab", OK, text)


def check_kernel() -> Iterator[Finding]:
    """The ``python3`` kernel must be this Python, or the labs run somewhere else."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    way_out = f"{sys.executable} -m ipykernel install --sys-prefix"
    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        yield Finding("kernel", PROBLEM, "there is no kernel python3", way_out)
        return
    if os.path.basename(command) == command or os.path.normpath(command) == sys.executable:
        yield Finding("kernel", OK, "python3 is this Python")
    else:
        yield Finding("kernel", WARNING, f"python3 starts {command}, not this Python", way_out)


def check_shared_memory() -> Iterator[Finding]:
    """Containers often have 64 MB of ``/dev/shm``; DataLoader workers then die of a bus error."""
    size = hardware.shared_memory()
    way_out = "docker run --shm-size=2g; on Kubernetes mount an emptyDir of medium Memory there"
    free = hardware.shared_memory(free=True)
    if size is None or free is None:
        yield Finding("/dev/shm", OK, "not used on this system")
    elif free < SHM_PROBLEM <= size:
        text = f"{free / _MIB:.0f} of {size / _MIB:.0f} MiB free"
        way_out = "end what uses it; `ls /dev/shm` shows what ended programs have left"
        yield Finding("/dev/shm", WARNING, text, way_out)
    elif size < SHM_PROBLEM:
        yield Finding("/dev/shm", PROBLEM, f"{size / _MIB:.0f} MiB", way_out)
    elif size < SHM_WARNING:
        yield Finding("/dev/shm", WARNING, f"{size / _MIB:.0f} MiB", way_out)
    else:
        yield Finding("/dev/shm", OK, f"{size / _GIB:.1f} GiB")


def check_size() -> Iterator[Finding]:
    """Cores and memory, as limited by affinity and cgroup."""
    cores, present = hardware.usable_cores(), os.cpu_count() or 1
    limited = f" of {present}, by affinity or cgroup" if cores < present else ""
    if cores < 2:
        way_out = "ranks take turns on one core: everything runs, but slowly"
        yield Finding("cores", WARNING, f"{cores}{limited}", way_out)
    else:
        yield Finding("cores", OK, f"{cores}{limited}")
    memory = hardware.memory_limit()
    text = f"{memory / _GIB:.1f} GiB"
    if memory < 1.5 * _GIB:
        yield Finding("memory", PROBLEM, text, "the labs need 2 GiB: raise the container's limit")
    elif memory < 3 * _GIB:
        yield Finding("memory", WARNING, text, "use two ranks (gpus = 2), one lab at a time")
    else:
        yield Finding("memory", OK, text)


def check_host_name() -> Iterator[Finding]:
    """Process groups look up this machine's own name."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0]
    except OSError as error:
        way_out = f"add `127.0.0.1 {name}` to /etc/hosts"
        yield Finding("host name", WARNING, f"{name} does not resolve: {error}", way_out)
    else:
        only = ", which other machines cannot reach: a job over nodes needs another MASTER_ADDR"
        yield Finding(
            "host name", OK, f"{name} is {address}{only if is_loopback(str(address)) else ''}"
        )


def check_loopback() -> Iterator[Finding]:
    """Ranks on one machine meet on a free port of the loopback interface."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            port = server.getsockname()[1]
            yield Finding("free port", OK, f"for example {port}")
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                server.accept()[0].close()
        yield Finding("loopback", OK, "127.0.0.1 answers")
    except OSError as error:
        way_out = "bring up lo (`ip link set lo up`) and let no firewall stop 127.0.0.1"
        yield Finding("loopback", PROBLEM, f"ranks cannot meet on 127.0.0.1: {error}", way_out)


def check_leftovers() -> Iterator[Finding]:
    """Ranks that an earlier run has left behind hold ports and memory."""
    from labutils.leftovers import leftovers

    found = [str(process.pid) for process in leftovers()]
    if found:
        text = f"{len(found)} processes of earlier runs: {', '.join(found)}"
        way_out = f"unless you want them, end them: kill -9 {' '.join(found)}"
        yield Finding("leftover ranks", WARNING, text, way_out)
    else:
        yield Finding("leftover ranks", OK, "none")


def check_write_access() -> Iterator[Finding]:
    """Runs are recorded in temporary files, progress under the user's data folder."""
    from labutils.folders import progress_folder

    places: dict[str, str | Path] = {
        "temporary files": tempfile.gettempdir(),
        "progress": progress_folder(),
    }
    for what, place in places.items():
        try:
            Path(place).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"x")
        except OSError as error:
            variable = "TMPDIR" if what == "temporary files" else "LABUTILS_DATA"
            level = PROBLEM if what == "temporary files" else WARNING
            way_out = f"set {variable} to a folder where you may write"
            yield Finding(what, level, f"cannot write in {place}: {error.strerror}", way_out)
        else:
            yield Finding(what, OK, str(place))


CHECKS: list[Callable[[], Iterator[Finding]]] = [
    check_python,
    check_torch,
    check_gpus,
    check_front_end,
    check_kernel,
    check_shared_memory,
    check_size,
    check_host_name,
    check_loopback,
    check_leftovers,
    check_write_access,
]


def examine() -> list[Finding]:
    """Run every check."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            text = f"could not be checked: {type(error).__name__}: {error}"
            findings.append(Finding(name, PROBLEM, text, _INSTALL))
    return findings


def report(findings: list[Finding]) -> str:
    """The findings as aligned lines, ways out indented below."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.what:<{width}}  {finding.text}")
        if finding.way_out:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.way_out}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils doctor``."""
    parser.add_argument("--json", action="store_true", help="for programs: a list of findings")


def main(arguments: argparse.Namespace) -> int:
    """Print the report; 1 if there is a problem, warnings count as fine."""
    findings = examine()
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(report(findings))
    return int(any(finding.level == PROBLEM for finding in findings))


def _missing_extensions() -> list[str]:
    """JupyterLab's halves of the widget packages: each must lie where it looks, and be enabled."""
    from jupyter_core.paths import jupyter_config_path, jupyter_path

    disabled: dict[str, bool] = {}
    for folder in reversed(jupyter_config_path()):  # the user's own settings have the last word
        for file in sorted(Path(folder, "labconfig").glob("page_config.json")):
            with contextlib.suppress(OSError, ValueError):
                disabled |= json.loads(file.read_text()).get("disabledExtensions", {})
    found = [name for place in jupyter_path("labextensions") for name in EXTENSIONS
             if Path(place, name).is_dir()]  # fmt: skip
    return [f"{name} is missing" for name in EXTENSIONS if name not in found] + [
        f"{name} is disabled" for name in EXTENSIONS if disabled.get(name)
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _fits(package: str, version: str | None) -> bool:
    return version is not None and int(version.split(".")[0]) == FRONT_END[package]
