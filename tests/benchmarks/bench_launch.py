"""Launching: how quick ranks are, what watching them costs, and what memory they take."""

from __future__ import annotations

import importlib.util
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from labutils import telemetry
from labutils.launch import launch, monitor
from labutils.launch.processes import close_fork_server, fork_server

RANKS = 4
Row = tuple[str, float, float]

SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(f"REDUCED={time.monotonic()}=\\n", end="", flush=True)
dist.destroy_process_group()
"""
CELL = "dist.all_reduce(t)"


def measure() -> list[Row]:
    """Rows of (name, value, upper bound)."""
    return [*_starting(), *_cells(), _telemetry(), _checking()]


def _median(values: Iterator[float]) -> float:
    return statistics.median(list(values))


def _seconds(work: Callable[[], Any]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


# -- from the call to the last rank's first all-reduce --------------------------------------------


def _starting() -> list[Row]:
    torchrun = _median(_torchrun() for _ in range(3))
    cold = _median(_launch(cold=True) for _ in range(3))
    prepared = _median(_prepared_launch() for _ in range(3))
    later = _median(_launch(cold=False) for _ in range(7))
    return [
        ("first launch of 4 ranks, without %load_ext / torchrun", cold / torchrun, 0.5),
        ("first launch of 4 ranks, right after %load_ext / torchrun", prepared / torchrun, 0.3),
        ("later launch of 4 ranks / torchrun", later / torchrun, 0.05),
    ]


def _prepared_launch() -> float:
    """In a fresh process, as a notebook begins: load the extension, import torch, launch."""
    script = (
        "from labutils.launch.processes import fork_server\n"
        "fork_server()  # what %load_ext does\n"
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'])\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import bench_launch; print(bench_launch._launch(cold=False))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _torchrun() -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={RANKS}", str(script)]  # fmt: skip
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    times = [float(text) for text in re.findall(r"REDUCED=([\d.]+)=", done.stdout)]
    assert len(times) == RANKS
    return max(times) - start


def _launch(cold: bool) -> float:
    def first() -> float:
        dist.all_reduce(torch.ones(1))
        return time.monotonic()

    if cold:
        close_fork_server()
    start = time.monotonic()
    return float(max(launch(first, ranks=RANKS).results)) - start


# -- a cell on warm ranks -------------------------------------------------------------------------


@contextmanager
def _shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "labutils.launch.cells")
    try:
        yield shell
    finally:
        shell.run_line_magic("unload_ext", "labutils.launch.cells")


def _cells() -> list[Row]:
    close_fork_server()
    alone = _pss(psutil.Process())
    with _shell() as shell:
        shell.run_cell_magic("ranks", str(RANKS), "t = torch.ones(1)")
        shell.run_cell_magic("ranks", "", CELL)
        server = psutil.Process(fork_server().pid)
        pool = [server, *server.children(recursive=True)]
        assert len(pool) == RANKS + 1
        together = sum(map(_pss, [psutil.Process(), *pool]))
        warm = _median(_seconds(lambda: shell.run_cell_magic("ranks", "", CELL)) for _ in range(60))
    rows: list[Row] = [
        ("warm %%ranks 4 cell, ms", warm * 1e3, 5.0),
        ("what fork server and 4 ranks add, MiB (PSS)", together - alone, 220.0),
    ]
    if importlib.util.find_spec("ipyparallel"):
        rows.append(("warm %%ranks 4 cell / ipyparallel's %%px", warm / _ipyparallel(), 0.2))
    return rows


def _pss(process: psutil.Process) -> float:
    """Memory of a process in MiB, what it shares counted in parts; 0 where that is not known."""
    return getattr(process.memory_full_info(), "pss", 0) / 2**20


def _ipyparallel() -> float:
    import ipyparallel  # type: ignore[import-not-found,unused-ignore]

    with ipyparallel.Cluster(n=RANKS) as cluster:
        view = cluster[:]
        view.block = True
        port = _free_port()
        view.push({"port": port, "size": RANKS})
        view.scatter("rank", list(range(RANKS)), flatten=True)
        view.execute(
            "import torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}',"
            " rank=rank, world_size=size)\nt = torch.ones(1)"
        )
        return _median(_seconds(lambda: view.execute(CELL)) for _ in range(30))


def _free_port() -> int:
    """A port that is free now."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# -- what watching costs --------------------------------------------------------------------------


def _ddp_steps(pairs: int) -> float:
    """Median ratio of a DDP step with telemetry to the same step without, in one rank."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batch = torch.randn(256, 512)
    watching = monitor._monitor, telemetry._recorder, list(telemetry._sinks)

    def step(watch: bool) -> float:
        monitor._monitor, telemetry._recorder, sinks = watching if watch else (None, None, [])
        telemetry._sinks[:] = sinks
        dist.barrier()
        start = time.perf_counter()
        with telemetry.span("forward"):
            loss = model(batch).square().mean()
        with telemetry.span("backward"):
            loss.backward()
        with telemetry.span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    ratios = []
    for pair in range(pairs):
        taken = {watch: step(watch) for watch in ((True, False) if pair % 2 else (False, True))}
        ratios.append(taken[True] / taken[False])
    step(True)
    return statistics.median(ratios[5:])


def _telemetry() -> Row:
    """The background samples of memory fall on both kinds of steps; they are bounded by design."""
    shares = []
    for _ in range(3):
        run = launch(_ddp_steps, ranks=2, args=(200,), timeout=120, checked=False)
        shares.append(statistics.mean(run.results) - 1)
    return "telemetry on a DDP step, share of its time", statistics.median(shares), 0.01


def _reduce(count: int) -> float:
    """Median seconds of an all-reduce of one element."""
    value = torch.ones(1)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(value)
        times.append(time.perf_counter() - start)
    return statistics.median(times[count // 10 :])


def _checking() -> Row:
    differences = []
    for _ in range(5):
        checked, plain = (
            statistics.median(launch(_reduce, ranks=RANKS, args=(400,), checked=on).results)
            for on in (True, False)
        )
        differences.append(checked - plain)
    return "checked mode on 4 ranks, ms per collective", statistics.median(differences) * 1e3, 1.0
