"""A run: one call (or cell, or script) on ranks, supervised until the last of them is done."""

from __future__ import annotations

import contextlib
import contextvars
import selectors
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from labutils import rundir
from labutils.launch import board as boards
from labutils.launch import output, verdict
from labutils.launch.failures import describe_exception
from labutils.launch.pool import Ranks, free_memory
from labutils.launch.report import Ended, first_failure, readable, report
from labutils.launch.wire import Packed
from labutils.trace import Trace

_TICK_S = 0.05
_WATCH_S = 0.2  # between two updates of a live view
_GRACE_S, _LONG_GRACE_S = 0.3, 3.0
_INTERRUPT_GRACE_S = 1.0
_MESSAGE_S = 60.0  # for the rest of a message that has begun to arrive


class RankFailure(RuntimeError):
    """A rank failed.  ``rank`` is the one that failed first (None: a time limit), ``run`` its run."""

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
        if timeout is not None and not timeout > 0:
            raise ValueError(
                f"timeout must be a number of seconds above 0, or None, not {timeout!r}."
            )
        self.ranks, self.timeout, self._keep, self._view = ranks, timeout, keep, view
        self._message, self._packed = message, packed
        self.members = list(range(ranks.world.size)) if members is None else members
        self.results: list[Any] = [None] * ranks.world.size
        self.failure: RankFailure | None = None
        self.directory = self._run_directory(title) if record else ""
        self._start_ns = time.monotonic_ns()
        self._options = {"epoch": next(ranks.epoch), "checked": checked}
        self._show = show
        self._logs = [output.Log(rank, show, colour) for rank in range(ranks.world.size)]
        self.ends: dict[int, Ended] = {}
        self._counts: dict[int, dict[str, int]] = {}
        self._stop_reason = ""
        self._thread: threading.Thread | None = None
        self._moved = time.monotonic()
        self._done = False

    def _run_directory(self, title: str) -> str:
        if not self._keep:
            return rundir.create(title)
        self.ranks.directory = self.ranks.directory or rundir.create(title)
        return self.ranks.directory

    @property
    def logs(self) -> list[str]:
        """What each rank has printed so far."""
        return [log.text for log in self._logs]

    @property
    def trace(self) -> Trace:
        """What was measured so far.  Cells on the same ranks share a directory; each has its part."""
        return rundir.merge(self.directory, self._start_ns) if self.directory else Trace()

    @property
    def running(self) -> bool:
        """Whether the ranks are still at work."""
        return not self._done

    def __repr__(self) -> str:
        state = "running" if self.running else "failed" if self.failure else "done"
        return f"<Run on {len(self.members)} ranks: {state}>"

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
        self._stop_reason = "stopped"
        if self._thread is not None:
            self._thread.join(10)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end; raises the :class:`RankFailure` if there is one.

        A ``timeout`` in seconds raises TimeoutError and leaves the run as it is; an interrupt
        stops the ranks.
        """
        try:
            if self._thread is not None:
                self._thread.join(timeout)
                if self._thread.is_alive():
                    raise TimeoutError(f"the run has not ended within {timeout} s; it goes on.")
        except KeyboardInterrupt:
            self.stop()
            raise
        if self.failure is not None:
            raise self.failure
        return self

    def supervise(self) -> None:
        """Talk to the ranks until the run is over; raises :class:`RankFailure`."""
        try:
            with selectors.DefaultSelector() as selector:
                self._begin(selector)
                try:
                    self._follow(selector)
                except KeyboardInterrupt:
                    self._interrupt(selector)
                    raise
        except BaseException:
            self._conclude(failed=True)
            raise
        self._conclude(failed=bool(self.ends_badly()) or bool(self._stop_reason))
        if self.failure is not None:
            raise self.failure

    def ends_badly(self) -> list[Ended]:
        """The ranks that did not return."""
        return [end for end in self.ends.values() if end.kind != "returned"]

    # -- while it runs ---------------------------------------------------------------------------

    def _begin(self, selector: selectors.BaseSelector) -> None:
        kind, details = self._message
        for rank in range(self.ranks.world.size):
            self.ranks.board.forget(rank)
            self.ranks.board.set_state(
                boards.RUNNING if rank in self.members else boards.ABSENT, rank
            )
        for rank in self.members:
            process = self.ranks.processes[rank]
            process.output.setblocking(False)
            selector.register(process.output, selectors.EVENT_READ, (self._read_output, rank))
            selector.register(process.channel, selectors.EVENT_READ, (self._read_message, rank))
        for rank in self.members:
            record = rundir.rank_file(self.directory, rank) if self.directory else ""
            options = {**details, **self._options, "record": record}
            self.ranks.send(rank, (kind, options), self._packed)
        self._moved = time.monotonic()

    def _follow(self, selector: selectors.BaseSelector, until: float | None = None) -> None:
        """Until every rank has ended, a failure has been looked at, or the time is up."""
        followed = self._view and rundir.Follower(self.directory, self._start_ns)
        next_view = time.monotonic() + _WATCH_S
        while len(self.ends) < len(self.members) and not self._stop_reason:
            for key, _ in selector.select(_TICK_S):
                read, rank = key.data
                read(rank, selector)
            now = time.monotonic()
            if followed and now > next_view:
                self._view.update(*followed.poll(), followed.now)
                next_view = time.monotonic() + _WATCH_S
            self._notice_deaths(selector)
            until = until or self._deadline_after_failure()
            if until is not None and now > until:
                return
            if until is None and self.timeout is not None:
                self._stop_reason = verdict.stalled(self, now - self.timeout, self._moved)

    def _read_output(self, rank: int, selector: selectors.BaseSelector) -> None:
        sock = self.ranks.processes[rank].output
        while True:
            try:
                data = sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(sock)
                return
            self._moved = time.monotonic()
            self._logs[rank].feed(data)
            if len(data) < 1 << 16:
                return

    def _drain_output(self, rank: int, selector: selectors.BaseSelector) -> None:
        """Read all that is there now, for a rank that has ended."""
        before = -1
        while before != len(self._logs[rank].text):
            before = len(self._logs[rank].text)
            self._read_output(rank, selector)

    def _read_message(self, rank: int, selector: selectors.BaseSelector) -> None:
        channel = self.ranks.processes[rank].channel
        channel.sock.settimeout(_MESSAGE_S)
        try:
            message, packed = channel.recv(free_memory)
        except (EOFError, OSError):
            self._died(rank, selector)
            return
        except MemoryError as error:
            self.ranks.processes[rank].kill()
            self._end(
                Ended(rank, "error", time.monotonic_ns(), describe_exception(error)), selector
            )
            return
        finally:
            channel.sock.settimeout(None)
        self._moved = time.monotonic()
        if message[0] == "warning":
            self._show(readable(f"Warning: {message[1]}\n"))
            return
        self._counts[rank] = message[2]
        self._take(rank, message, packed, selector)

    def _take(
        self, rank: int, message: tuple[Any, ...], packed: Packed, selector: selectors.BaseSelector
    ) -> None:
        error = message[3] if message[0] == "error" else {}
        if message[0] == "done":
            try:
                self.results[rank] = packed.load()
            except Exception as problem:
                error = describe_exception(problem)
        kind = "error" if error else "returned"
        if error.get("type") == "KeyboardInterrupt":
            kind = "interrupted"
        self._end(Ended(rank, kind, message[1], error), selector)

    def _notice_deaths(self, selector: selectors.BaseSelector) -> None:
        for rank in self.members:
            if rank not in self.ends and self.ranks.processes[rank].exit_code() is not None:
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(self.ranks.processes[rank].channel)
                # Its last message may still be there to read.
                self._read_message(rank, selector)
                if rank not in self.ends:
                    self._died(rank, selector)

    def _died(self, rank: int, selector: selectors.BaseSelector) -> None:
        code = verdict.exit_code(self.ranks.processes[rank])
        stack = verdict.crash_stack(self.ranks, rank)
        self._end(Ended(rank, "died", time.monotonic_ns(), code=code, stack=stack), selector)

    def _end(self, end: Ended, selector: selectors.BaseSelector) -> None:
        if end.rank in self.ends:
            return
        end.last = self.ranks.board.last(end.rank)
        self.ends[end.rank] = end
        self._drain_output(end.rank, selector)
        self._logs[end.rank].finish()
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(self.ranks.processes[end.rank].channel)

    def _deadline_after_failure(self) -> float | None:
        """How long the others may still go on by themselves once a rank has failed."""
        failed = [end for end in self.ends.values() if end.kind in ("error", "died")]
        if not failed:
            return None
        # What only follows from another failure came first: the cause is still to come.
        only_secondary = all(end.secondary for end in failed)
        first = min(end.time_ns for end in failed) * 1e-9
        return first + (_LONG_GRACE_S if only_secondary else _GRACE_S)

    def _interrupt(self, selector: selectors.BaseSelector) -> None:
        """Raise KeyboardInterrupt in the ranks, and give them a moment to come back from it."""
        for rank in self.members:
            if rank not in self.ends:
                self.ranks.processes[rank].kill(verdict.INTERRUPT)
        self._follow(selector, until=time.monotonic() + _INTERRUPT_GRACE_S)

    # -- when it is over -------------------------------------------------------------------------

    def _conclude(self, failed: bool) -> None:
        try:
            if failed:
                self._look_around()
                self._name_failure()
            if failed and not verdict.can_go_on(self._keep, self.members, self.ends, self._counts):
                self.ranks.kill()
            if not self._keep or not self.ranks.alive:
                self.ranks.close()
            if self._view is not None:
                self._view.close(self.trace)
        finally:
            if sys.exc_info()[0] is not None and not self._keep:
                self.ranks.close(0)
            self._packed = None
            self._done = True

    def _look_around(self) -> None:
        """Note what the ranks that have not ended are doing."""
        stuck = [rank for rank in self.members if rank not in self.ends]
        stacks = verdict.stacks(self.ranks, stuck)
        for rank in stuck:
            end = Ended(rank, "hangs", stack=stacks[rank], last=self.ranks.board.last(rank))
            self.ends[rank] = end
            with contextlib.suppress(OSError):
                self._logs[rank].feed(self.ranks.processes[rank].output.recv(1 << 20))
            self._logs[rank].finish()

    def _name_failure(self) -> None:
        ends = [self.ends[rank] for rank in sorted(self.ends)]
        timed_out = self._stop_reason not in ("", "stopped")
        first = first_failure(ends)
        if timed_out:
            self.failure = RankTimeout(report(ends, self._stop_reason), None, self)
        elif first is not None:
            self.failure = RankFailure(report(ends), first.rank, self)
