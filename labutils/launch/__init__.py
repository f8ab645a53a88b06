"""Running code on ranks: functions of a notebook, scripts, and cells (``%%ranks``)."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from labutils.folders import find_script
from labutils.launch import output, wire
from labutils.launch.group import device
from labutils.launch.pool import Ranks, StartError
from labutils.launch.processes import forking_is_safe
from labutils.launch.run import RankFailure, RankTimeout, Run, check_timeout
from labutils.launch.world import World

__all__ = ["RankFailure", "RankTimeout", "Run", "StartError", "device", "launch", "torchrun"]


def launch(
    fn: Callable[..., Any],
    ranks: int = 4,
    nodes: int = 1,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = 30.0,
    watch: bool = False,
    block: bool = True,
    *,
    checked: bool = True,
    collect: bool = False,
    record: bool = True,
    network: str | None = None,
    bandwidth: str | None = None,
    delay: str | None = None,
) -> Run:
    """Run a function of this notebook on ``ranks`` processes (per node), as torchrun would.

    In each rank the environment is torchrun's (RANK, LOCAL_RANK, WORLD_SIZE, …), the process group
    is ready, and :func:`device` is the rank's GPU.  The function, its arguments and what it uses of
    the notebook travel by value, and so do the results; tensors arrive on the CPU.

    Args:
        fn: the function; it runs once in each rank.
        ranks: ranks per node.
        nodes: with more than one, as many torchrun agents on this machine, with a real rendezvous.
        args: positional arguments for ``fn``, the same on every rank.
        kwargs: keyword arguments likewise.
        timeout: seconds without any progress (a rank waits that long in one collective, or no
            collective completes, no span ends and nothing new is printed) after which the ranks are
            stopped and the report says where each of them was.  A rank that prints the same few
            lines again and again prints nothing new.  A run that gets on may take as long as it
            likes.  None: no limit.
        watch: show the live view while it runs.
        block: wait for the end; otherwise return at once, for ``run.wait()`` and ``run.stop()``
            (with ``watch`` the view has a button for that).
        checked: compare each collective across ranks before it runs.
        collect: show what ranks print at the end, in rank order, instead of as it comes.
        record: write spans, collectives and memory to the run's directory, for ``run.trace``.
        network: "namespaces" gives each node an address, an interface and a host name of its own
            (Linux, root, iproute2; elsewhere the cell says so, and the loopback device serves).
        bandwidth, delay: what that network is limited to, e.g. ``"1gbit"`` and ``"2ms"``.

    Returns:
        The :class:`Run`; ``run.results[rank]`` is what ``fn`` returned there.

    Raises:
        RankFailure: a rank failed; the message says which one, where, and what the others did.
        ValueError: the numbers make no sense, or the machine has no room for the ranks.
        TypeError: something that ``fn`` uses cannot travel between processes; it is named.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function to run on each rank, not {fn!r}.")
    _not_inside_a_rank("lab.launch")
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise TypeError(f"args must be a tuple of arguments, not {args!r}: write args=({args!r},).")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs must be a dict of named arguments, not {kwargs!r}.")
    check_timeout(timeout)
    world = World(ranks, nodes)
    packed = wire.pack_call(fn, tuple(args), dict(kwargs or {}))
    name = getattr(fn, "__name__", "a function")
    shape = network_shape(nodes, network, bandwidth, delay)
    return _run(
        world, ("call", {}), packed, name, timeout, watch, block, checked, collect, record, shape
    )


def torchrun(
    script: str,
    *arguments: object,
    ranks: int = 4,
    nodes: int = 1,
    timeout: float | None = 30.0,
    watch: bool = False,
    block: bool = True,
    checked: bool = False,
    collect: bool = False,
    record: bool = True,
    network: str | None = None,
    bandwidth: str | None = None,
    delay: str | None = None,
) -> Run:
    """Run a script under torchrun, with ``arguments`` on its command line; see :func:`launch`.

    The script is what it is in production: it makes its own process group.  Raises
    :class:`RankFailure` where torchrun's own exit code would go unnoticed in a notebook.
    """
    _not_inside_a_rank("lab.torchrun")
    check_timeout(timeout)
    world = World(ranks, nodes)
    path = find_script(script)
    details = {"script": path, "arguments": [str(argument) for argument in arguments]}
    name = os.path.basename(path)
    return _run(
        world, ("script", details), None, name, timeout, watch, block, checked, collect, record,
        network_shape(nodes, network, bandwidth, delay),
    )  # fmt: skip


def _run(
    world: World, message: tuple[str, dict[str, Any]], packed: wire.Packed | None, name: str,
    timeout: float | None, watch: bool, block: bool, checked: bool, collect: bool, record: bool,
    shape: tuple[str | None, str | None] | None,
) -> Run:  # fmt: skip
    script = message[0] == "script"
    if 0 < world.gpus < world.size:
        output.to_cell(f"{world.about()}\n")
    started = _job(world, shape) if script or world.nodes > 1 else Ranks(world)
    started.start(group=not script)
    try:
        run = Run(
            started, message, packed, timeout=timeout, title=name, checked=checked, record=record,
            show=(lambda _: None) if collect else output.shower(block), colour=output.coloured(),
            view=_live_view(name, None if block else lambda: run.stop()) if watch else None,
        )  # fmt: skip
    except BaseException:
        started.close(0)
        raise
    if not block:
        run.start_in_background()
        return run
    try:
        run.supervise()
    finally:
        if collect:
            output.to_cell(output.in_rank_order(run.logs, output.coloured()))
    return run


def _job(world: World, shape: tuple[str | None, str | None] | None) -> Ranks:
    if forking_is_safe():
        from labutils.launch.forked import ForkedJobRanks

        return ForkedJobRanks(world, shape)
    from labutils.launch.job import JobRanks

    return JobRanks(world)


def network_shape(
    nodes: int, network: str | None, bandwidth: str | None, delay: str | None
) -> tuple[str | None, str | None] | None:
    """The bandwidth and delay of a network of namespaces; None, with a reason in the cell where
    one was asked for, for the loopback device.

    Raises ValueError for arguments that make no sense.
    """
    from labutils.launch import network as networks

    networks.bits_per_second(bandwidth), networks.seconds(delay)
    if network is None and (bandwidth or delay):
        raise ValueError("bandwidth and delay shape a network: pass network='namespaces' as well.")
    if network is None:
        return None
    if network != "namespaces":
        raise ValueError(f"network={network!r} is not known: choose 'namespaces', or None.")
    if nodes < 2:
        raise ValueError("network='namespaces' joins nodes: choose nodes=2 or more.")
    reason = networks.missing() if forking_is_safe() else "Network namespaces need forked ranks."
    if reason:
        output.to_cell(f"{reason} The nodes share the loopback device, which nothing shapes.\n")
        return None
    return bandwidth, delay


def _live_view(title: str, stop: Callable[[], None] | None) -> Any:
    from labutils.live import LiveView

    view = LiveView(title, stop=stop)
    view.show()
    return view


def _not_inside_a_rank(name: str) -> None:
    if "labutils.launch.rank" in sys.modules and torch.distributed.is_initialized():
        raise RuntimeError(f"{name} was called inside a rank; call it in the notebook.")


class _CallableModule(types.ModuleType):
    """``lab.launch`` is this package, and ``lab.launch(fn)`` calls :func:`launch`."""

    __call__ = staticmethod(launch)


sys.modules[__name__].__class__ = _CallableModule
