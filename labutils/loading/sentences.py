"""What a failing DataLoader means, and the way out, in one sentence each."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

from labutils import hardware

_MIB = 1 << 20
_SIGKILL, _SIGBUS = (-getattr(signal, name, 0) or None for name in ("SIGKILL", "SIGBUS"))


class LoaderError(RuntimeError):
    """A DataLoader failed for a known reason; the message says what to do about it."""


def explain(error: BaseException, loader: Any = None) -> str | None:
    """The sentence for an exception that a DataLoader raised; None for one that is not known.

    Args:
        loader: the DataLoader, whose settings the sentence then names.
    """
    text = f"{type(error).__name__}: {error}"
    for pattern, sentence in _KNOWN:
        found = re.search(pattern, text, re.IGNORECASE | re.DOTALL)
        if found:
            return sentence(found, loader)
    return None


class explained:  # noqa: N801 - reads like contextlib's own
    """Within the block, a known failure of ``loader`` is raised as :class:`LoaderError`."""

    def __init__(self, loader: Any = None) -> None:
        self.loader = loader

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if isinstance(error, Exception) and not isinstance(error, (StopIteration, LoaderError)):
            sentence = explain(error, self.loader)
            if sentence is not None:
                raise LoaderError(sentence) from error


def _shared_memory(found: re.Match[str], loader: Any) -> str:
    size = hardware.shared_memory()
    has = "" if size is None else f" ({size / _MIB:.0f} MiB here)"
    return (
        f"The workers ran out of shared memory: batches pass through /dev/shm{has}, and "
        f"{_in_flight(loader)} do not fit. Make /dev/shm larger (docker run --shm-size=2g; on "
        "Kubernetes an emptyDir of medium Memory mounted there), or have fewer bytes under way: "
        "smaller batches, fewer workers, prefetch_factor=1, or num_workers=0."
    )


def _in_flight(loader: Any) -> str:
    workers = getattr(loader, "num_workers", 0)
    if not workers:
        return "those under way"
    factor = loader.prefetch_factor
    return f"{workers} workers × prefetch_factor {factor} = {workers * factor} batches under way"


def _killed(found: re.Match[str], loader: Any) -> str:
    limit = hardware.memory_limit() / (1 << 30)
    return (
        "A worker was killed from outside, as happens when memory runs out "
        f"({limit:.1f} GiB may be used here): every worker holds what its data set loads. Use "
        "fewer workers, smaller batches, or a data set that reads on demand."
    )


def _exited(found: re.Match[str], loader: Any) -> str:
    """By how the workers ended, where that is known; a negative code is a signal's number."""
    codes = [worker.exitcode for worker in getattr(loader, "workers", [])]
    if _SIGKILL is not None and _SIGKILL in codes:
        return _killed(found, loader)
    if _SIGBUS is not None and _SIGBUS in codes:
        return _shared_memory(found, loader)
    method = _start_method(loader)
    if method == "fork":
        return (
            "A worker ended without a word: something in the data set ended the process (os._exit, "
            "a crash in C code). num_workers=0 shows the error where it happens."
        )
    return (
        f"A worker ended while it started: with the start method {method} it cannot find classes "
        "and functions that exist only in a notebook. Use lab.Loader, which sends their code "
        "along, or put them into a .py file and import them."
    )


def _start_method(loader: Any) -> str:
    import torch.multiprocessing

    context = getattr(loader, "multiprocessing_context", None)
    return str((context or torch.multiprocessing).get_start_method())


def _files(found: re.Match[str], loader: Any) -> str:
    return (
        f"Too many files are open (the limit is {_file_limit()}): each tensor that comes from a "
        "worker holds a file descriptor while it lives, and each worker several. Raise the limit "
        "(ulimit -n 65535), keep fewer batches, or call "
        'torch.multiprocessing.set_sharing_strategy("file_system").'
    )


def _file_limit() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _pickling(found: re.Match[str], loader: Any) -> str:
    reason = re.sub(r" at 0x[0-9a-f]+", "", found[0].splitlines()[0])[:120]
    return (
        f"The data set or one of the loader's functions cannot be sent to a worker "
        f"({reason}): with the start method {_start_method(loader)}, plain "
        "DataLoader takes only what an import finds. Use lab.Loader, which takes lambdas and local "
        "classes, and open files and connections inside the worker."
    )


def _ragged(found: re.Match[str], loader: Any) -> str:
    sizes = re.search(r"got (\[[^\]]*\]) at entry 0 and (\[[^\]]*\]) at entry (\d+)", found[0])
    which = f" (sample 0 has {sizes[1]}, sample {sizes[3]} has {sizes[2]})" if sizes else ""
    return (
        f"The samples of a batch have different shapes{which}, and the default collate function "
        "can only stack equal ones. Crop or resize in the data set, or give a collate_fn that pads."
    )


def _forked_cuda(found: re.Match[str], loader: Any) -> str:
    return (
        "A worker was forked from a process that had used CUDA, and tried to use it too. Keep the "
        "data set on the CPU and move the batch in the training loop, or start workers with "
        'multiprocessing_context="forkserver".'
    )


def _timeout(found: re.Match[str], loader: Any) -> str:
    return (
        f"No batch came within {getattr(loader, 'timeout', 0):g} s: a worker is slow or stuck in "
        "the data set. Raise the loader's timeout, or look with num_workers=0 where it stays."
    )


_KNOWN: list[tuple[str, Callable[[re.Match[str], Any], str]]] = [
    (r"too many open files|received \d+ items of ancdata", _files),
    (r"bus error|shared memory|no space left on device|unable to (?:write to|resize) (?:a )?file"
     r"|/torch_\d+_\d+", _shared_memory),
    (r"is killed by signal: (?:killed|terminated)", _killed),
    (r"cannot re-initialize cuda in forked", _forked_cuda),
    (r"exited unexpectedly|killed by signal", _exited),
    (r"can't (?:get|pickle) (?:local object|attribute)[^\n]*|can't pickle[^\n]*"
     r"|picklingerror[^\n]*|cannot pickle[^\n]*", _pickling),
    (r"stack expects each tensor to be equal size[^\n]*|each element in list of batch should be of "
     r"equal size", _ragged),
    (r"dataloader timed out", _timeout),
]  # fmt: skip
"""What the exception's text looks like, and who makes the sentence; the first that fits."""
