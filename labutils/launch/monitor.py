"""Watching torch.distributed from inside a rank: numbering, checking and timing its calls.

The public functions of torch.distributed are wrapped once per process.  DDP's reducer is C++ and
calls none of them, so its gradient buckets are watched through a communication hook, which does
exactly what DDP does without one.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from labutils import telemetry
from labutils.launch import calls
from labutils.launch.board import Board, Last
from labutils.launch.calls import Call
from labutils.launch.checked import Checker

_WORTH_SHOWING_S = 50e-6  # a shorter wait for the other ranks is not drawn


class Monitor:
    """Everything that is known about the calls of this rank."""

    def __init__(self, rank: int, board: Board | None, warn: Callable[[str], None]) -> None:
        self.rank, self.board = rank, board
        self.checker = Checker(board, rank, warn) if board else None
        self.checked = False
        self.counts: Counter[str] = Counter()
        self.inside = threading.local()
        self._lock = threading.Lock()
        self._newest: Call | None = None

    def new_epoch(self, epoch: int, checked: bool) -> None:
        """A new cell or run begins."""
        self.checked = checked
        self.counts.clear()
        self._newest = None
        if self.checker:
            self.checker.new_epoch(epoch)

    def begin(self, call: Call, check: bool = True) -> Any:
        """Number the call, say so on the board, compare it with the other ranks; returns a mark."""
        with self._lock:
            key = _series(call)
            self.counts[key] += 1
            call.sequence = self.counts[key]
            self._newest = call
        self._say(call, "issued" if call.asynchronous else "waiting")
        if check and self.checked and self.checker and not call.peer:
            start = time.monotonic_ns()
            if self.checker.compare(call) > _WORTH_SHOWING_S:
                telemetry.record("wait for the others", "wait", start, lane="communication")
        return telemetry.mark()

    def end(self, call: Call, mark: Any) -> None:
        """The call is complete."""
        telemetry.record(
            call.op, "communication", mark, lane="communication", nbytes=call.nbytes,
            detail=f"{call.detail.removeprefix(' of ')}, group of {len(call.members)}".lstrip(", "),
        )  # fmt: skip
        self._say(call, "done")

    def _say(self, call: Call, state: str) -> None:
        if self.board is None:
            return
        with self._lock:
            if call is self._newest:
                self.board.set_last(Last(call.text, call.where, time.monotonic_ns(), state))
            if state == "done":
                self.board.advance()


def _series(call: Call) -> str:
    """What is counted together.  A send and the receive that answers it count under one name."""
    if call.peer:
        return f"{call.op.lstrip('i')} {call.root}"
    buckets = "" if call.comparable else " buckets"
    return f"{call.group} {','.join(map(str, call.members))}{buckets}"


_monitor: Monitor | None = None


def install(monitor: Monitor) -> None:
    """Watch this process's calls with ``monitor`` from now on."""
    global _monitor
    first, _monitor = _monitor is None, monitor
    if not first:
        return
    for op in (*calls.COLLECTIVES, *calls.PEER_TO_PEER):
        if hasattr(distributed_c10d, op):
            _replace(op, _watched(op, getattr(distributed_c10d, op)))
    _watch_ddp()


def _replace(name: str, function: Callable[..., Any]) -> None:
    setattr(distributed_c10d, name, function)
    setattr(dist, name, function)


def _watched(op: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        monitor = _monitor
        if monitor is None or getattr(monitor.inside, "call", False):
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            call = calls.describe(op, bound.arguments)
        except Exception:  # wrong arguments: let torch say so
            call = None
        if call is None:
            return original(*args, **kwargs)
        monitor.inside.call = True
        try:
            mark = monitor.begin(call)
            result = original(*args, **kwargs)
        finally:
            monitor.inside.call = False
        if isinstance(result, dist.Work):
            return _when_done(result, monitor, call, mark)
        monitor.end(call, mark)
        return result

    return watched


def _when_done(work: Any, monitor: Monitor, call: Call, mark: Any) -> Any:
    """End the call when its work is complete; sends and receives have no future to ask."""
    if call.peer:
        return _Waited(work, lambda: monitor.end(call, mark))
    try:
        work.get_future().add_done_callback(lambda _: monitor.end(call, mark))
    except RuntimeError:
        return _Waited(work, lambda: monitor.end(call, mark))
    return work


class _Waited:
    """A ``Work`` that tells when it has been waited for."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        then, self._then = self._then, lambda: None
        then()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _watch_ddp() -> None:
    """Give each DDP a hook at its first forward, unless the user has registered one."""
    register, forward = DistributedDataParallel.register_comm_hook, DistributedDataParallel.forward

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> Any:
        self._labutils_hook = True
        return register(self, state, _timed_hook(self, hook))

    @functools.wraps(forward)
    def first_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if _monitor is not None and not getattr(self, "_labutils_hook", False):
            self._labutils_hook = True
            if not self._comm_hooks:
                register(self, self.process_group, _timed_hook(self, _average))
        return forward(self, *inputs, **kwargs)

    DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]
    DistributedDataParallel.forward = first_forward  # type: ignore[method-assign]


def _average(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook: scale by 1/N, then sum over the ranks."""
    buffer = bucket.buffer().mul_(1.0 / group.size())
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def _timed_hook(module: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    def timed(state: object, bucket: dist.GradBucket) -> Any:
        monitor = _monitor
        if monitor is None:
            return hook(state, bucket)
        buffer = bucket.buffer()
        call = Call(
            f"all_reduce of bucket {bucket.index()}", module.process_group.group_name,
            tuple(dist.get_process_group_ranks(module.process_group)),
            str(buffer.dtype).removeprefix("torch.") + f" {tuple(buffer.shape)}", "", -1,
            buffer.numel() * buffer.element_size(), False, "", True, "DistributedDataParallel",
        )  # fmt: skip
        monitor.inside.call = True
        try:
            # DDP's buckets are the same on all ranks, and comparing would end the overlap.
            mark = monitor.begin(call, check=False)
            future = hook(state, bucket)
        finally:
            monitor.inside.call = False
        future.add_done_callback(lambda _: monitor.end(call, mark))
        return future

    timed.__annotations__.clear()  # DDP wants the class there, or nothing; not its name
    return timed
