"""What a loader says when it fails: real failures where this machine can have them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import labutils as lab
from labutils.loading.sentences import explain

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def _workers_end_here() -> Iterator[None]:
    """A failure's traceback keeps the iterator, whose workers hold what this process had open:
    with the browser's pipes among it, the browser would not end before them."""
    yield
    gc.collect()


class Fails(Dataset[Any]):
    """Sample 3 is the one that fails."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("no such picture")
        return index


class Ends(Dataset[Any]):
    """Its process ends, or is ended from outside."""

    def __init__(self, signal: int = 0) -> None:
        self.signal = signal

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if self.signal:
            os.kill(os.getpid(), self.signal)
        os._exit(3)


def failure(data: Any, **options: Any) -> str:
    with pytest.raises(lab.LoaderError) as caught:
        list(lab.Loader(data, **options))
    assert isinstance(caught.value.__cause__, Exception)  # the original stays visible
    return str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_ragged_batches(workers: int) -> None:
    data = [torch.zeros(3), torch.zeros(5)]
    text = failure(data, batch_size=2, num_workers=workers)
    assert "sample 0 has [3], sample 1 has [5]" in text and "collate_fn that pads" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_stays_what_it_is(workers: int) -> None:
    with pytest.raises(KeyError, match="no such picture"):
        list(lab.Loader(Fails(), num_workers=workers))


@pytest.mark.parametrize(
    ("signal", "says"), [(0, "num_workers=0 shows the error"), (9, "memory runs out")]
)
def test_a_worker_that_dies(signal: int, says: str) -> None:
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    if "fork" not in torch.multiprocessing.get_all_start_methods():
        pytest.skip("no fork on this system")
    assert says in failure(Ends(signal), **options)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_plain_dataloader_cannot_pickle() -> None:
    loader = DataLoader([1, 2], collate_fn=lambda x: x, num_workers=1,
                        multiprocessing_context="spawn")  # fmt: skip
    with pytest.raises(Exception, match="(?i)pickle") as caught:
        next(iter(loader))
    text = explain(caught.value, loader)
    assert text is not None and "spawn" in text and "lab.Loader" in text and " at 0x" not in text


def test_an_unknown_error_has_no_sentence() -> None:
    assert explain(RuntimeError("CUDA error: an illegal memory access")) is None


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
         "dataloader's workers are out of shared memory.", "docker run --shm-size"),
        ("unable to allocate shared memory(shm) for file </torch_8_1>: No space left on device",
         "4 workers × prefetch_factor 3 = 12 batches"),
        ("received 0 items of ancdata", "ulimit -n"),
        ("OSError: [Errno 24] Too many open files", "set_sharing_strategy"),
        ("Cannot re-initialize CUDA in forked subprocess", "forkserver"),
        ("DataLoader timed out after 5 seconds", "timeout"),
    ],
)  # fmt: skip
def test_messages_that_people_report(message: str, says: str) -> None:
    """The texts are PyTorch's own, as in its sources and in reports of its users."""
    loader = DataLoader([1], num_workers=4, prefetch_factor=3, timeout=5)
    assert says in str(explain(RuntimeError(message), loader))


def test_too_many_open_files_for_real() -> None:
    """Each tensor from a worker holds a file; a process that may open few keeps too many."""
    script = """
        import resource, sys, torch, labutils as lab
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            kept = list(lab.Loader([torch.zeros(10)] * 400, num_workers=1))
        except lab.LoaderError as error:
            print("SENTENCE", error)
    """
    assert "ulimit -n" in sentence(script)


def sentence(script: str, prefix: list[str] = []) -> str:  # noqa: B006 - not changed
    command = [*prefix, sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SENTENCE")]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    return "\n".join(lines)


def small_shm(megabytes: int) -> list[str]:
    """How to run a command with a ``/dev/shm`` of that size, in a mount namespace of its own."""
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm"
    prefix = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("mounting a small /dev/shm needs root")
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace here: {tried.stderr.decode().strip()}")
    return prefix


TOO_LARGE = """
    import torch, labutils as lab
    class Big(torch.utils.data.Dataset):
        def __len__(self): return 64
        def __getitem__(self, index): return torch.ones({floats})
    try:
        list(lab.Loader(Big(), batch_size=1, num_workers=2, multiprocessing_context="fork"))
    except lab.LoaderError as error:
        print("SENTENCE", error)
"""


@pytest.mark.parametrize("megabytes", [16, 64])
def test_a_small_shared_memory_is_a_sentence(megabytes: int) -> None:
    """Each batch is larger than /dev/shm: the worker gets a bus error, or is refused."""
    text = sentence(TOO_LARGE.format(floats=(megabytes << 20) // 2), small_shm(megabytes))
    assert f"/dev/shm ({megabytes} MiB here)" in text and "--shm-size" in text


@pytest.mark.parametrize("megabytes", [16, 64])
def test_pictures_fit_into_a_small_shared_memory(megabytes: int) -> None:
    """Batches that do fit come through, with 2 workers."""
    script = """
        import torch, labutils as lab
        data = torch.utils.data.TensorDataset(torch.ones(64, 3, 64, 64))
        loader = lab.Loader(data, batch_size=16, num_workers=2, multiprocessing_context="fork")
        print("SENTENCE", sum(len(x) for x, in loader))
    """
    assert sentence(script, small_shm(megabytes)) == "SENTENCE 64"


def test_the_report_does_without_workers_where_shared_memory_is_small() -> None:
    script = """
        import torch, labutils as lab
        data = torch.utils.data.TensorDataset(torch.ones(64, 3, 160, 160))
        loader = torch.utils.data.DataLoader(data, batch_size=32, num_workers=2)
        report = lab.loader_report(loader, lambda batch: None, seconds=1)
        print("SENTENCE", report.recommended["num_workers"], report.findings.notes[0])
    """
    text = sentence(script, small_shm(16))
    assert text.startswith("SENTENCE 0 /dev/shm has 16 MiB, too little for two batches of 9.38 MiB")
