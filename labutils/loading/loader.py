"""A DataLoader that can be watched, takes classes of a notebook, and explains its failures."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader

from labutils import rundir, telemetry
from labutils.loading import sentences
from labutils.loading.worker import WATCHED, Collate, Envelope, Start, timed

PRELOADED = ["labutils.loading.worker", "labutils.loading.images", "PIL.JpegImagePlugin"]
"""What the fork server imports once, so that each of its workers starts in milliseconds."""

KEPT = 4096
"""Batches of which the making is remembered."""


class Loader(DataLoader[Any]):
    """``DataLoader``, with the same arguments and the same batches, whose workers can be watched.

    * ``lab.watch_loading`` shows each worker process on a lane of its own: what its data set names
      with ``lab.span``, and collating.
    * Data set, collate function and ``worker_init_fn`` travel by value, so that those of a
      notebook, lambdas and local classes work with every start method.
    * Known failures (``/dev/shm``, file descriptors, pickling, ragged batches) become a
      :class:`labutils.loading.sentences.LoaderError` that says what to do.

    ``made`` holds when and by whom the latest batches were made.
    """

    def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
        _prepare_fork_server()
        super().__init__(timed(dataset), *args, **options)
        self.made: deque[Envelope] = deque(maxlen=KEPT)
        self.workers: list[Any] = []
        """The worker processes of the latest pass."""
        self._run = _Run()
        self.collate_fn = Collate(self.collate_fn)
        self._own_init = self.worker_init_fn
        loaders.add(self)

    def __iter__(self) -> Any:
        if self.num_workers > 0:
            self.worker_init_fn = Start(self._run.directory(), self._own_init)
        with sentences.explained(self):
            batches = super().__iter__()
        self.workers = getattr(batches, "_workers", [])
        return _Batches(self, batches)

    def check_worker_number_rationality(self) -> None:
        """PyTorch warns of more workers than cores; those that wait for a disk need none."""

    @property
    def run_directory(self) -> str:
        """Where the workers write their spans while somebody watches; "" before they start."""
        return self._run.path


loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
"""All that exist in this process."""


class _Batches:
    """The batches of one pass, out of their envelopes."""

    def __init__(self, loader: Loader, batches: Any) -> None:
        self._loader, self._batches = loader, batches
        self._waits = loader.num_workers > 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def close(self) -> None:
        """End the workers now, rather than when this object is forgotten."""
        if self._waits and not self._loader.persistent_workers:
            self._batches._shutdown_workers()

    def __next__(self) -> Any:
        waiting = telemetry.span("wait for batch", "data") if self._waits else nullcontext()
        with sentences.explained(self._loader), waiting:
            envelope = next(self._batches)
        self._loader.made.append(replace(envelope, data=None))
        return envelope.data


class _Run:
    """The run directory of one loader: made when its workers first start, gone with the loader."""

    watchers = 0
    """How many watches follow the loaders of this process."""

    def __init__(self) -> None:
        self.path = ""

    def directory(self) -> str:
        """Make it if there is none yet."""
        with _making:
            if not self.path:
                path = rundir.create("loader")
                weakref.finalize(self, _remove, path, os.getpid())
                self.path = path
                self.flag()
        return self.path

    def flag(self) -> None:
        """Let the workers see whether anybody watches; they look once per batch."""
        if not self.path:
            return
        flag = Path(self.path) / WATCHED
        if _Run.watchers:
            flag.touch()
        else:
            flag.unlink(missing_ok=True)


_making = threading.RLock()


def watched(more: int) -> None:
    """There is one watch more (1) or fewer (-1), which concerns the workers of every loader."""
    with _making:
        _Run.watchers += more
        while leaving and not _Run.watchers:
            shutil.rmtree(leaving.pop(), ignore_errors=True)
        for loader in list(loaders):
            with contextlib.suppress(OSError):
                loader._run.flag()


leaving: list[str] = []
"""Directories of loaders that are gone, kept until whoever watches has read them."""


def _remove(path: str, owner: int) -> None:
    if not path or os.getpid() != owner:  # a forked worker has copies of everything
        return
    if _Run.watchers:
        leaving.append(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def twin(loader: DataLoader[Any], batches: int | None = None, **changes: Any) -> Loader:
    """A :class:`Loader` on the same data set with the same options, except for ``changes``.

    The given loader is not touched: samplers and generators are copied.  The data set is shared,
    unless ``changes`` name another as ``dataset``.
    With ``batches`` a loader over a map-style data set goes on over several epochs, so that it
    yields that many.
    """
    options = _options(loader, batches)
    options |= changes
    if options["num_workers"] == 0:
        for name, value in _ONLY_WORKERS.items():
            options[name] = value
    return Loader(options.pop("dataset", loader.dataset), **options)


_ONLY_WORKERS: dict[str, Any] = {
    "prefetch_factor": None, "persistent_workers": False, "timeout": 0,
    "multiprocessing_context": None,
}  # fmt: skip
"""Options that DataLoader takes only with workers, and their values without."""


def _options(loader: DataLoader[Any], batches: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "timeout", "prefetch_factor", "in_order",
                     "persistent_workers", "multiprocessing_context")
    }  # fmt: skip
    collate, init = loader.collate_fn, loader.worker_init_fn
    if isinstance(loader, Loader):
        collate, init = loader.collate_fn.inner, loader._own_init  # type: ignore[union-attr]
    options |= {"collate_fn": collate, "worker_init_fn": init}
    sampler, batch_sampler, options["generator"] = _copies(loader)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif batch_sampler is None:
        options |= {"batch_size": None, "sampler": _Again(sampler, batches)}
    else:
        options["batch_sampler"] = _Again(batch_sampler, batches)
    return options


def _copies(loader: DataLoader[Any]) -> Any:
    """Copies of sampler, batch sampler and generator that share the data set."""
    inner = getattr(loader.dataset, "inner", None)
    memo = {id(loader.dataset): loader.dataset, id(inner): inner}
    try:
        return copy.deepcopy((loader.sampler, loader.batch_sampler, loader.generator), memo)
    except Exception as error:
        raise ValueError(
            "the loader's sampler cannot be copied, so its state would be used up "
            f"({type(error).__name__}: {error}): give a loader with a sampler that copy.deepcopy "
            "can copy."
        ) from error


class _Again:
    """A sampler that begins anew until it has yielded ``most`` (None: one pass)."""

    def __init__(self, sampler: Any, most: int | None) -> None:
        self.sampler, self.most = sampler, most

    def __len__(self) -> int:
        return len(self.sampler) if self.most is None else self.most

    def __iter__(self) -> Iterator[Any]:
        if self.most is None:
            yield from self.sampler
            return
        left = self.most
        while left > 0:
            before = left
            for item in self.sampler:
                yield item
                left -= 1
                if not left:
                    return
            if left == before:  # an empty sampler
                return


def _prepare_fork_server() -> None:
    """The fork server imports what workers need before there is one (later calls do nothing)."""
    if "forkserver" in torch.multiprocessing.get_all_start_methods():
        from multiprocessing.forkserver import _forkserver

        if getattr(_forkserver, "_preload_modules", None) == ["__main__"]:  # not chosen by the user
            torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
