"""Objects that travel to a worker process by value, whatever start method it has.

``spawn`` and ``forkserver`` (the default on Linux from Python 3.14) pickle the data set, and plain
pickle writes only the *names* of classes and functions: those of a notebook, lambdas and local
classes cannot be found again in the worker.  cloudpickle sends their code instead.
"""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import torch.multiprocessing  # noqa: F401 - registers how tensors travel through shared memory


class ByValue:
    """Holds ``value``, which is pickled with the code of its classes and functions."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[bytes], ByValue], tuple[bytes]]:
        return _load, (_dump(self.value),)


def _load(data: bytes) -> ByValue:
    return ByValue(pickle.loads(data))


def _dump(value: Any) -> bytes:
    stream = io.BytesIO()
    pickler = cloudpickle.Pickler(stream)
    shared = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    pickler.dispatch_table = ChainMap(shared, pickler.dispatch_table)
    pickler.dump(value)
    return stream.getvalue()
