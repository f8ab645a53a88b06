"""The operation graph: what the virtual GPUs were asked to do, in the order in which it was asked.

Every operation on a virtual GPU appends one :class:`Entry` to a bounded log.  An entry says which
host thread issued it, on which device and stream it runs, and what it costs (:class:`Kernel`).
Nothing here knows how long anything takes: ``labutils.timing.schedule`` plays a :class:`Graph` on a
hardware profile.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from labutils.virtual.wall import Pacer

_graph_task = torch._C._current_graph_task_id

CAPACITY = 400_000
"""Entries kept by default; older ones are dropped (and counted)."""

DEFAULT_STREAM = 0
COMM_STREAM = -1
"""The stream on which collectives run, as NCCL keeps one of its own per device."""

NATIVE = "native"
"""``ref`` of a kernel that C++ issued by itself on a Python thread, with the GIL released."""


class Kernel(NamedTuple):
    """One operation's work, independent of hardware.  Interned: equal calls share one object."""

    name: str
    """The ATen operator, e.g. ``addmm``, or ``h2d``, ``d2h``, ``p2p``, ``all_reduce``."""
    kind: str
    """Class for the cost model: gemm, conv, attention, norm, reduction, elementwise, optimizer,
    copy, communication, view (costs host time only)."""
    dtype: str
    """Element type of the arithmetic, e.g. ``float32``, ``bfloat16``."""
    flops: int
    """Floating-point operations (a multiply-add counts as two)."""
    bytes_read: int
    bytes_written: int
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensor arguments, for cost models that look at them."""
    tensors: int = 0
    """How many tensors the call reads and writes (a fused optimizer step touches many)."""

    @property
    def bytes(self) -> int:
        """Bytes moved to and from the device's memory."""
        return self.bytes_read + self.bytes_written


class Entry(NamedTuple):
    """One line of the log.  ``what`` decides which of the other fields matter:

    ========== =====================================================================================
    kernel     ``kernel`` runs on (``device``, ``stream``); ``ref`` is ``NATIVE`` or None
    copy       ``kernel`` (name h2d, d2h or p2p) moves ``kernel.bytes_read`` bytes;
               ``ref`` is a :class:`Copy`
    collective ``kernel`` runs on every device of ``ref`` (a :class:`Collective`) at once
    memory     the device's allocated bytes change by ``ref`` once the stream has reached this point
    record     event ``ref`` (an int) is recorded on (``device``, ``stream``)
    wait       (``device``, ``stream``) waits for event ``ref``
    sync       the host thread waits: ``ref`` is None for the whole device, ("stream", id) or
               ("event", id)
    fork       thread ``thread`` started thread ``ref``
    join       thread ``thread`` waited for the end of thread ``ref``
    after      thread ``thread`` may go on only once log entry number ``ref`` has been issued
    begin      a span named ``ref`` begins on ``thread`` (and on the devices it uses)
    end        the innermost span of ``thread`` ends
    host       the thread is busy for ``ref`` seconds with work of its own
    ========== =====================================================================================
    """

    what: str
    thread: str
    device: int
    stream: int
    phase: str
    """forward, backward, optimizer, data, or "" where it is not known."""
    kernel: Kernel | None = None
    ref: Any = None


class Copy(NamedTuple):
    """Where a copy goes.  Device -1 is the host."""

    source: int
    target: int
    pinned: bool
    """Host memory is page-locked (always true between devices)."""
    blocking: bool
    """The host waits for the end of the copy."""
    source_stream: int = DEFAULT_STREAM
    """The stream of the source device that the copy is ordered after (copies between devices)."""


class Collective(NamedTuple):
    """A collective.  Within one process ``devices`` are virtual GPUs; across processes they are
    ranks, and (``group``, ``sequence``) is the same on every rank that takes part."""

    op: str
    devices: Sequence[int]
    group: str = ""
    sequence: int = 0
    root: int = -1
    asynchronous: bool = False


@dataclass
class Graph:
    """A stretch of the log, ready to be scheduled."""

    entries: list[Entry]
    first: int = 0
    """Log number of ``entries[0]`` (``after`` entries refer to log numbers)."""
    devices: int = 0
    allocated: tuple[int, ...] = ()
    """Bytes allocated on each device where the stretch begins."""
    capacity: tuple[int, ...] = ()
    """Bytes that each device has."""
    profile: str = ""
    dropped: int = 0
    """Entries lost because the log was full."""


class HostThread:
    """What the recorder knows of one host thread."""

    __slots__ = ("autograd", "name", "native", "phase", "task", "task_start")

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = ""
        self.native = False
        """It is in a C++ function that issues operations by itself."""
        self.task = -1
        """The autograd graph task that is running on this thread, or -1."""
        self.task_start = 0
        """Log number at which that task began."""
        self.autograd: set[str] = set()
        """Names of the engine's threads that stand for this thread's backward."""


class Recorder:
    """The bounded log, and which host thread is speaking.

    Threads are told apart so that the scheduler can let them compete for the GIL.  A thread is
    forked where its first operation is recorded, and joined where another thread records its first
    operation after its end; ``nn.DataParallel`` starts and joins its threads just so.

    On the CPU, autograd runs backward on the thread that called it.  With GPUs the engine has one
    thread a device, so operations inside a backward are attributed to ``autograd <device>``, and
    ``after`` entries keep the order between those threads where data passes from one to another.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.log: deque[Entry] = deque(maxlen=capacity)
        self.count = 0
        self.lock = threading.Lock()
        self.pacer: Pacer | None = None
        """Plays the log in real time, where that is asked for."""
        self._allocated: dict[int, int] = {}
        self._local = threading.local()
        self._children: list[tuple[threading.Thread, str]] = []

    def append(self, entry: Entry, memory: Entry | None = None) -> int:
        """Add a line, and one on memory behind it if there is one.

        In real time, the calling thread waits here for the devices where it has to.

        Returns:
            The number of ``entry``, counted from the first line ever.
        """
        pacer = self.pacer
        with self.lock:
            number = self.count
            self.log.append(entry)
            until = pacer.arrive(entry) if pacer else None
            if memory is not None:
                self.log.append(memory)
                if pacer:
                    pacer.arrive(memory)
            self.count = number + (1 if memory is None else 2)
        if until is not None and pacer:
            pacer.wait(until, entry)
        return number

    def host(self) -> HostThread:
        """The calling host thread; known from its first operation on."""
        try:
            host: HostThread = self._local.host
        except AttributeError:
            host = self._introduce()
        if self._children and host.name == "main":
            self._join(host)
        return host

    def speaker(self, host: HostThread, device: int) -> str:
        """The thread to attribute an operation on ``device`` to."""
        task = _graph_task()
        if task != host.task:
            self._switch(host, task)
        if task == -1:
            return host.name
        name = f"autograd {device}"
        if name not in host.autograd:
            host.autograd.add(name)
            self.append(Entry("fork", host.name, device, 0, "backward", ref=name))
        return name

    def memory_change(self, device: int, allocated: int) -> int:
        """Bytes by which ``device`` has grown since this was last asked."""
        change = allocated - self._allocated.get(device, 0)
        if change:
            self._allocated[device] = allocated
        return change

    def since(self, mark: int) -> tuple[list[Entry], int]:
        """The entries numbered ``mark`` and later that are still there, and how many are lost."""
        with self.lock:
            kept = min(self.count - mark, len(self.log))
            entries = list(islice(self.log, len(self.log) - kept, None))
            return entries, self.count - mark - kept

    def _introduce(self) -> HostThread:
        thread = threading.current_thread()
        if thread is threading.main_thread():
            host = HostThread("main")
        else:
            host = HostThread(thread.name)
            self.append(Entry("fork", "main", -1, 0, "", ref=host.name))
            self._children.append((thread, host.name))
        self._local.host = host
        return host

    def _join(self, host: HostThread) -> None:
        for child in self._children[:]:
            thread, name = child
            if not thread.is_alive() and child in self._children:
                self._children.remove(child)
                self.append(Entry("join", host.name, -1, 0, host.phase, ref=name))

    def _switch(self, host: HostThread, task: int) -> None:
        for name in sorted(host.autograd):
            self.append(Entry("join", host.name, -1, 0, "backward", ref=name))
        host.autograd.clear()
        host.task = task
        host.task_start = self.count


def thread_order(name: str) -> tuple[str, int]:
    """Sort key that puts ``Thread-9`` before ``Thread-10``."""
    number = re.search(r"\d+", name)
    return re.sub(r"\d+.*", "", name), int(number.group()) if number else 0
