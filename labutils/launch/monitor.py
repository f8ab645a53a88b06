"""Watching torch.distributed from inside a rank: numbering, checking and timing its calls.

The public functions of torch.distributed are wrapped once per process.  DDP's reducer is C++ and
calls none of them, so it is given a process group that passes everything on to the real one.  (A
communication hook would cost a pass over the gradients; without one, a copy scales them.)
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
import zlib
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
        self._open: set[int] = set()
        """Calls whose end another thread will tell of."""

    def end_with(self, future: Any, call: Call, mark: Any) -> None:
        """The call is complete once ``future`` is; a thread of the backend says so."""
        self._open.add(id(call))

        def ended(_: Any) -> None:
            self.end(call, mark)
            self._open.discard(id(call))

        future.add_done_callback(ended)

    def settle(self, seconds: float = 0.5) -> None:
        """Give such threads a moment to finish what they have to say."""
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            time.sleep(0.001)
        self._open.clear()

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
            call.series = _series(call)
            self.counts[call.series] += 1
            call.sequence = self.counts[call.series]
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
                buckets = 0 if call.comparable else zlib.crc32(call.series.encode())
                now = time.monotonic_ns()
                self.board.set_last(Last(call.text, call.where, now, state, buckets))
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
        monitor.end_with(work.get_future(), call, mark)
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
    """Have every DDP's reducer talk to a group that tells; the user's own hooks are timed too."""
    register, forward = DistributedDataParallel.register_comm_hook, DistributedDataParallel.forward
    reducer = dist.Reducer

    @functools.wraps(reducer, updated=())
    def watched_reducer(
        parameters: Any, buckets: Any, limits: Any, group: Any, *rest: Any, **more: Any
    ) -> Any:
        told = BucketGroup(group)
        made = reducer(parameters, buckets, limits, told, *rest, **more)
        _bucket_groups[made] = told
        return made

    @functools.wraps(forward)
    def counted_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if (told := _bucket_groups.get(self.reducer)) is not None:
            told.buckets = 0
        return forward(self, *inputs, **kwargs)

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> Any:
        return register(self, state, _timed_hook(self, hook))

    dist.Reducer = watched_reducer  # type: ignore[misc, assignment]
    DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]
    DistributedDataParallel.forward = counted_forward  # type: ignore[method-assign]


class BucketGroup(dist.ProcessGroup):
    """A process group for DDP's reducer: the real one, and each bucket's all-reduce is told."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.real, self.buckets = group, 0
        self._members = tuple(dist.get_process_group_ranks(group))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        monitor = _monitor
        if monitor is None:
            return self.real.allreduce(tensors, opts)
        name = f"all_reduce of bucket {self.buckets}"
        if not tensors[
            0
        ].is_floating_point():  # which parameters were used (find_unused_parameters)
            name = "all_reduce of used parameters"
        else:
            self.buckets += 1
        call = _bucket_call(name, self.real, self._members, tensors[0])
        # DDP's buckets are the same on all ranks, and comparing would end the overlap.
        mark = monitor.begin(call, check=False)
        work = self.real.allreduce(tensors, opts)
        monitor.end_with(work.get_future(), call, mark)
        return work

    def broadcast(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        return self.real.broadcast(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:  # type: ignore[override]
        return self.real.allgather(outputs, inputs, opts)

    def barrier(self, opts: Any) -> Any:  # type: ignore[override]
        return self.real.barrier(opts)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "labutils"


_bucket_groups: weakref.WeakKeyDictionary[Any, BucketGroup] = weakref.WeakKeyDictionary()


def _bucket_call(name: str, group: Any, members: tuple[int, ...], buffer: torch.Tensor) -> Call:
    count = buffer.numel()
    return Call(
        name, group.group_name, members, _flat(buffer.dtype, count), "", -1,
        count * buffer.element_size(), False, "", True, "DistributedDataParallel",
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _flat(dtype: torch.dtype, count: int) -> str:
    """What a bucket is: the same, step after step."""
    return f"{str(dtype).removeprefix('torch.')} ({count},)"


def _timed_hook(module: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    def timed(state: object, bucket: dist.GradBucket) -> Any:
        monitor = _monitor
        if monitor is None:
            return hook(state, bucket)
        group = module.process_group
        members = tuple(dist.get_process_group_ranks(group))
        call = _bucket_call(f"hook of bucket {bucket.index()}", group, members, bucket.buffer())
        monitor.inside.call = True
        try:
            mark = monitor.begin(call, check=False)
            future = hook(state, bucket)
        finally:
            monitor.inside.call = False
        monitor.end_with(future, call, mark)
        return future

    timed.__annotations__.clear()  # DDP wants the class there, or nothing; not its name
    return timed
