"""A time limit for code that runs in the notebook's own process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TooSlow(BaseException):
    """The answer has not come back within the time limit.

    Not an Exception, so that ``except Exception`` in an endless loop does not catch it.
    """


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TooSlow` in the block after ``seconds``, where the system has such alarms.

    In another thread than the main one, and on Windows, there is no limit.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return

    def ring(*_: Any) -> None:
        raise TooSlow(f"it has not come back within {seconds:g} s: does a loop never end?")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, if the block goes on all the same
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
