"""Recordings made in a process beside the notebook's, so that the notebook goes on meanwhile."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import IO, Any

from torch import nn

from ..guard import python
from ..launch.processes import quiet_environment
from ..models import ModelSpec
from . import library
from .bench import phantom, record
from .library import Source
from .predict import Question
from .recording import Recording, Setting
from .scaled import recording

LINGER_S = 60.0
"""How long the process waits for another question before it ends."""

Asked = dict[str, Any]
"""The arguments of a :class:`Question`."""

stored = partial(recording, record=library.known)
"""A recorder that takes no time: it raises ``NotRecorded`` for what has to be made first."""


class Ahead:
    """Makes the recordings that questions need, one after the other, the urgent ones first."""

    def __init__(self, arrived: Callable[[Asked, Exception | None], None]) -> None:
        """``arrived(asked, error)`` is called, on a thread of its own, once a question can be
        answered without recording, or cannot be: a ``ValueError`` says why the model fails, any
        other error why no process could record it."""
        self._arrived = arrived
        self._waiting: deque[Asked] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def want(self, asked: Asked, urgent: bool = False) -> None:
        """Have this question answerable soon, or next."""
        with self._changed:
            (self._waiting.appendleft if urgent else self._waiting.append)(asked)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="recording", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _work(self) -> None:
        with contextlib.closing(Process()) as process:
            while (asked := self._next()) is not None:
                try:
                    missing = _missing(asked)
                    if missing is not None:
                        library.put(*missing, process.record(*missing))
                        continue  # something more urgent may have come
                    error = None
                except Exception as reason:  # whatever it is, somebody waits for an answer
                    error = reason
                with self._changed:
                    self._waiting.remove(asked)
                self._arrived(asked, error)

    def _next(self) -> Asked | None:
        with self._changed:
            if not self._waiting and not self._changed.wait_for(lambda: self._waiting, LINGER_S):
                self._thread = None
                return None
            return self._waiting[0]


def _missing(asked: Asked) -> tuple[Source, Setting] | None:
    """The next recording that has to be made for a question."""
    try:
        Question(record=stored, **asked)
    except library.NotRecorded as missing:
        return missing.source, missing.setting
    return None


class Process:
    """Another Python that records; it starts at the first use, and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def record(self, source: Source, setting: Setting) -> Recording:
        """As ``library.recording``, but other threads of this process go on meanwhile.

        Raises:
            ValueError: the step fails.
            Exception: the model cannot be pickled, or the process has ended.
        """
        import cloudpickle

        asked = cloudpickle.dumps((_light(source), setting))
        if self._process is None:
            self._process = subprocess.Popen(
                python("labutils.timing.aside:main"), env=quiet_environment(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(asked, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        made: Recording = answer
        return made

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _light(source: Source) -> ModelSpec:
    """The spec of a model without the values of its parameters."""
    model = source.owner[0]
    if not isinstance(model, nn.Module):
        return source.spec
    hollow = phantom(model, device="meta")
    return replace(source.spec, build=lambda: hollow)


def main() -> None:
    """Entry point of the process: questions on standard input, recordings on standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a model prints is no recording
    if hasattr(os, "nice"):
        os.nice(5)  # the notebook goes first
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, questions), daemon=True).start()
    while True:
        pickle.dump(_answer(questions.get()), answers)
        answers.flush()


def _answer(question: bytes) -> Recording | Exception:
    try:
        return record(*pickle.loads(question))
    except ValueError as error:
        return ValueError(str(error))
    except Exception as error:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _listen(pipe: IO[bytes], questions: queue.SimpleQueue[bytes]) -> None:
    """Pass questions on; the end of the pipe is the end of the notebook, and of this process."""
    with contextlib.suppress(EOFError):
        while True:
            questions.put(pickle.load(pipe))
    os._exit(0)


__all__ = ["Ahead", "Process", "stored"]
