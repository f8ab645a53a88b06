"""What the tests of launching share: finding processes, and interrupting this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent


def alive(*pids: int) -> list[int]:
    """Those that live: one that has ended does not, even where nobody has collected it yet."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def processes_with(tag: str) -> list[int]:
    """Living processes that inherited ``tag`` in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if tag in process.environ().get("LABUTILS_TEST_TAG", ""):
                found += alive(process.pid)
    return found


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether ``condition`` becomes true in time."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


class Driver:
    """A Python process that plays the notebook's kernel: it runs ``code``, and says when to go on.

    The code prints READY once what is to be tested is under way.
    """

    def __init__(self, code: str, **environment: str) -> None:
        self.tag = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={**os.environ, "LABUTILS_TEST_TAG": self.tag, **environment},
        )  # fmt: skip

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "READY" in line:
                return
        raise AssertionError("the driver ended:\n" + "".join(said))

    def others(self) -> list[int]:
        """Its processes, besides itself."""
        return [pid for pid in processes_with(self.tag) if pid != self.process.pid]

    def close(self) -> None:
        for pid in {self.process.pid, *processes_with(self.tag)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def driver(code: str, **environment: str) -> Iterator[Driver]:
    """A :class:`Driver` that is ready, and gone afterwards."""
    started = Driver(code, **environment)
    try:
        started.wait_ready()
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Press Ctrl-C on this process after a while."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
