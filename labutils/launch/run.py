"""A run: one call (or cell, or script) on ranks, and what came of it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

from labutils import rundir
from labutils.launch import output
from labutils.launch.pool import Ranks
from labutils.launch.wire import Packed
from labutils.trace import Trace


class RankFailure(RuntimeError):
    """A rank failed.  ``rank`` failed first (None: a time limit); ``run`` is the whole run."""

    def __init__(self, message: str, rank: int | None, run: Run) -> None:
        super().__init__(message)
        self.rank, self.run = rank, run

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the report; the notebook's own frames would say nothing."""
        first, _, rest = str(self).partition("\n")
        return [f"\x1b[31m{type(self).__name__}: {first}\x1b[0m", *rest.split("\n")]


class RankTimeout(RankFailure, TimeoutError):
    """Nothing moved on for longer than the time limit."""


class Run:
    """What :func:`labutils.launch` returns.

    ``results`` has one value per rank (None where there is none), ``logs`` one text per rank,
    ``trace`` what was measured, ``failure`` the :class:`RankFailure` or None.
    """

    def __init__(
        self,
        ranks: Ranks,
        message: tuple[str, dict[str, Any]],
        packed: Packed | None = None,
        *,
        members: list[int] | None = None,
        timeout: float | None = 30.0,
        keep: bool = False,
        title: str = "",
        show: Callable[[str], None] = output.to_cell,
        colour: bool = False,
        view: Any = None,
        checked: bool = True,
        record: bool = True,
    ) -> None:
        check_timeout(timeout)
        size = ranks.world.size
        self.ranks, self.timeout, self.keep = ranks, timeout, keep
        self.message, self.packed, self.show, self.view = message, packed, show, view
        self.members = list(range(size)) if members is None else members
        self.results: list[Any] = [None] * size
        self.failure: RankFailure | None = None
        self.directory = self._run_directory(title) if record else ""
        self.options = {"epoch": next(ranks.epoch), "checked": checked}
        self.outputs = [output.Log(rank, show, colour) for rank in range(size)]
        self.start_ns = time.monotonic_ns()
        self.done = threading.Event()
        self.stopping = False
        self._thread: threading.Thread | None = None

    def _run_directory(self, title: str) -> str:
        if not self.keep:
            return rundir.create(title)
        self.ranks.directory = self.ranks.directory or rundir.create(title)
        return self.ranks.directory

    @property
    def logs(self) -> list[str]:
        """What each rank has printed so far."""
        return [log.text for log in self.outputs]

    @property
    def trace(self) -> Trace:
        """What was measured so far (cells on the same ranks share a directory)."""
        return rundir.merge(self.directory, self.start_ns) if self.directory else Trace()

    def simulated(self, profile: str = "", fabric: str = "") -> Trace:
        """How long it would take on real hardware: the ranks' virtual GPUs, played together.

        Args:
            profile: the hardware; what the virtual GPUs imitate if "".
            fabric: the network between nodes, if the ranks need more than one.

        Raises:
            ValueError: a rank has used no virtual GPU, or for too long to be kept.
        """
        from labutils.launch.recorded import simulate

        return simulate(self.directory, self.members, profile, fabric)

    @property
    def about(self) -> str:
        """What was chosen: ``4 ranks: gloo, 1 thread each``."""
        return self.ranks.world.about()

    @property
    def running(self) -> bool:
        """Whether the ranks are still at work."""
        return not self.done.is_set()

    def __repr__(self) -> str:
        state = "running" if self.running else "failed" if self.failure else "done"
        state = "stopped" if self.stopping and not self.running else state
        return f"<Run on {len(self.members)} ranks: {state}>"

    def supervise(self) -> None:
        """Talk to the ranks until the run is over; raises :class:`RankFailure`."""
        from labutils.launch.supervise import Supervisor

        Supervisor(self).work()
        if self.failure is not None:
            raise self.failure

    def start_in_background(self) -> None:
        """Supervise from a thread; its output belongs to the cell that called this."""
        context = contextvars.copy_context()

        def work() -> None:
            with contextlib.suppress(RankFailure):
                context.run(self.supervise)

        self._thread = threading.Thread(target=work, name="run", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the ranks now; returns when they are gone."""
        self.stopping = self.stopping or self.running
        if self._thread is not None:
            self.done.wait(10)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end; raises the :class:`RankFailure` if there is one.

        A ``timeout`` in seconds raises TimeoutError and leaves the run as it is; an interrupt
        stops the ranks.
        """
        try:
            if not self.done.wait(timeout):
                raise TimeoutError(f"the run has not ended within {timeout} s; it goes on.")
        except KeyboardInterrupt:
            self.stop()
            raise
        if self.failure is not None:
            raise self.failure
        return self


def check_timeout(timeout: float | None) -> None:
    """Raise ValueError for a time limit that makes no sense."""
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"timeout must be a number of seconds above 0, or None, not {timeout!r}.")
