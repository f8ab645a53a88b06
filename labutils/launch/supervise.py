"""Supervising a run: reading what its ranks say, noticing what goes wrong, ending it."""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from typing import Any

from labutils import rundir
from labutils.launch import board as boards
from labutils.launch import verdict
from labutils.launch.failures import describe_exception
from labutils.launch.output import Background
from labutils.launch.report import Ended, first_failure, readable, report
from labutils.launch.run import RankFailure, RankTimeout, Run
from labutils.launch.wire import Packed
from labutils.launch.world import free_memory

_TICK_S = 0.05
_WATCH_S = 0.2  # between two updates of a live view
_GRACE_S, _LONG_GRACE_S = 0.3, 3.0
_INTERRUPT_GRACE_S = 1.0
_READS = 16  # of up to 256 KiB, more than a socket holds, from a rank that may print without end
_MESSAGE_S = 60.0  # for the rest of a message that has begun to arrive


class Supervisor:
    """The loop behind a :class:`Run`, in the thread that calls :meth:`work`."""

    def __init__(self, run: Run) -> None:
        self.run, self.ranks = run, run.ranks
        self.processes = run.ranks.processes
        self.selector = selectors.DefaultSelector()
        self.ends: dict[int, Ended] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.moved = time.monotonic()
        self.stalled = self.abandoned = ""
        self.interrupted = False

    def work(self) -> None:
        """Until the run is over and, unless they are kept, its ranks are gone."""
        interrupt: KeyboardInterrupt | None = None
        try:
            self._begin()
            try:
                self._follow()
            except KeyboardInterrupt as error:
                interrupt = error
                self._interrupt()
            self._judge()
        except BaseException:
            self.ranks.kill()  # whatever happened here, no rank is left at work
            raise
        finally:
            self._let_go()
        if interrupt is not None:
            self.run.failure = None
            raise interrupt

    def _begin(self) -> None:
        run = self.run
        for rank in range(self.ranks.world.size):
            self.ranks.board.forget(rank)
            state = boards.RUNNING if rank in run.members else boards.ABSENT
            self.ranks.board.set_state(state, rank)
        for rank in run.members:
            process = self.processes[rank]
            process.output.setblocking(False)
            self.selector.register(process.output, selectors.EVENT_READ, (self._read_output, rank))
            self.selector.register(
                process.channel, selectors.EVENT_READ, (self._read_message, rank)
            )
        kind, details = run.message
        for rank in run.members:
            record = rundir.rank_file(run.directory, rank) if run.directory else ""
            self.ranks.send(rank, (kind, {**details, **run.options, "record": record}), run.packed)
        run.packed = None
        self.moved = time.monotonic()

    def _follow(self, until: float | None = None) -> None:
        """Until every rank has ended, a failure has been looked at, or the time is up."""
        run = self.run
        follower = rundir.Follower(run.directory, run.start_ns) if run.view is not None else None
        next_view = 0.0
        while len(self.ends) < len(run.members) and not self._is_over():
            for key, _ in self.selector.select(_TICK_S):
                read, rank = key.data
                read(rank)
            self._notice_deaths()
            now = time.monotonic()
            if follower is not None and now > next_view:
                run.view.update(*follower.poll(), follower.now)
                next_view = time.monotonic() + _WATCH_S
            deadline = until or self._deadline_after_failure()
            if deadline is not None and now > deadline:
                return
            running = [rank for rank in run.members if rank not in self.ends]
            if deadline is None:
                self.abandoned = verdict.abandoned(self.ranks.board, running)
            if deadline is None and run.timeout is not None:
                self.stalled = verdict.stalled(self.ranks.board, running, run.timeout, self.moved)

    def _is_over(self) -> bool:
        return bool(self.run.stopping or self.stalled or self.abandoned)

    def _read_output(self, rank: int) -> None:
        sock, log = self.processes[rank].output, self.run.outputs[rank]
        for _ in range(_READS):
            try:
                data = sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._unregister(sock)
                return
            log.feed(data)
            if not log.repeats:
                self.moved = time.monotonic()

    def _read_message(self, rank: int) -> None:
        channel = self.processes[rank].channel
        channel.sock.settimeout(_MESSAGE_S)
        try:
            message, packed = channel.recv(free_memory)
        except (EOFError, OSError):
            self._died(rank)
            return
        except MemoryError as error:
            self.processes[rank].kill()
            self._end(Ended(rank, "error", time.monotonic_ns(), describe_exception(error)))
            return
        finally:
            channel.sock.settimeout(None)
        self.moved = time.monotonic()
        if message[0] == "warning":
            self.run.show(readable(f"Warning: {message[1]}\n"))
        elif rank not in self.ends:
            self._take(rank, message, packed)

    def _take(self, rank: int, message: tuple[Any, ...], packed: Packed) -> None:
        """A rank has done its work, or failed at it."""
        kind, moment, self.counts[rank], *rest = message
        error = rest[0] if kind == "error" else {}
        if kind == "done":
            try:
                self.run.results[rank] = packed.load()
            except Exception as problem:
                error = describe_exception(problem)
        end = "error" if error else "returned"
        if self.interrupted and error.get("type") == "KeyboardInterrupt":
            end = "interrupted"
        self._end(Ended(rank, end, moment, error))

    def _notice_deaths(self) -> None:
        for rank in self.run.members:
            if rank not in self.ends and self.processes[rank].exit_code() is not None:
                while rank not in self.ends:  # its last messages may still be there to read
                    self._read_message(rank)

    def _died(self, rank: int) -> None:
        code = verdict.exit_code(self.processes[rank])
        stack = verdict.crash_stack(self.ranks, rank)
        self._end(Ended(rank, "died", time.monotonic_ns(), code=code, stack=stack))

    def _end(self, end: Ended) -> None:
        end.last = self.ranks.board.last(end.rank)
        self.ends[end.rank] = end
        self._read_output(end.rank)  # what it printed is there by now
        self.run.outputs[end.rank].finish()
        self._unregister(self.processes[end.rank].channel)

    def _unregister(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def _deadline_after_failure(self) -> float | None:
        """How long the others may still go on by themselves once a rank has failed."""
        failed = [end for end in self.ends.values() if end.kind in ("error", "died")]
        if not failed:
            return None
        # Where there are only consequences of another failure, the cause is still to come.
        known = any(not end.secondary for end in failed)
        return min(end.time_ns for end in failed) * 1e-9 + (_GRACE_S if known else _LONG_GRACE_S)

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in the ranks, and give them a moment to come back from it."""
        self.interrupted = True
        for rank in self.run.members:
            if rank not in self.ends:
                self.processes[rank].kill(signal.SIGINT)
        self._follow(until=time.monotonic() + _INTERRUPT_GRACE_S)

    def _judge(self) -> None:
        """Say what failed, if anything, and end the ranks unless they can go on."""
        stuck = [rank for rank in self.run.members if rank not in self.ends]
        if not stuck and all(end.kind == "returned" for end in self.ends.values()):
            return
        if not self.run.stopping:
            self._look_at(stuck)
            self._name_failure()
        if not (self.run.keep and verdict.in_step(self.run.members, self.ends, self.counts)):
            self.ranks.kill()

    def _look_at(self, stuck: list[int]) -> None:
        """Note what the ranks that have not ended are doing."""
        stacks = verdict.stacks(self.ranks, stuck)
        for rank in stuck:
            last = self.ranks.board.last(rank)
            self._end(Ended(rank, "hangs", time.monotonic_ns(), stack=stacks[rank], last=last))

    def _name_failure(self) -> None:
        ends = [self.ends[rank] for rank in sorted(self.ends)]
        first = first_failure(ends)
        if self.abandoned:
            self.run.failure = RankFailure(report(ends, self.abandoned), None, self.run)
        elif self.stalled:
            self.run.failure = RankTimeout(report(ends, self.stalled), None, self.run)
        elif first is not None:
            self.run.failure = RankFailure(report(ends), first.rank, self.run)

    def _let_go(self) -> None:
        try:
            self.selector.close()
            if not self.run.keep or not self.ranks.alive:
                self.ranks.close()
            if self.run.view is not None:
                self.run.view.close(self.run.trace)
            if isinstance(self.run.show, Background):
                self.run.show.finish()
        finally:
            self.run.done.set()
