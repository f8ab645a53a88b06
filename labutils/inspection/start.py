"""Running a script on ranks: under torchrun, or quicker on ranks forked from the lab's server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from labutils.folders import find_script
from labutils.launch import output, wire
from labutils.launch.pool import Ranks
from labutils.launch.run import RankFailure, Run, check_timeout
from labutils.launch.world import World


def run_script(
    script: str | os.PathLike[str],
    arguments: Sequence[object] = (),
    *,
    ranks: int = 2,
    nodes: int = 1,
    timeout: float | None = 30.0,
    quick: bool = False,
) -> Run:
    """Run ``script`` to its end; a failure is in ``run.failure``, not raised.

    Args:
        script: a Python file; ``arguments`` follow it on the command line.
        ranks: processes per node.
        nodes: nodes, all rehearsed on this machine.
        timeout: seconds without any progress after which the ranks are ended; None: no limit.
        quick: fork the ranks from the lab's server instead of starting torchrun: the environment is
            the same, the start takes a fraction of a second.

    Raises:
        ValueError: the numbers make no sense, or the machine has no room for the ranks.
        FileNotFoundError: there is no such script.
    """
    path = find_script(script)
    details = {"script": path, "arguments": [str(value) for value in arguments]}
    run = _prepare(("script", details), None, path, ranks, nodes, timeout, quick, False)
    with contextlib.suppress(RankFailure):
        run.supervise()
    return run


def observe_script(
    script: str | os.PathLike[str],
    arguments: Sequence[object],
    directory: str,
    *,
    ranks: int,
    nodes: int,
    limit: float,
    timeout: float,
    quick: bool,
    virtual: bool,
) -> tuple[Run, bool]:
    """Run ``script`` under observation, for ``limit`` seconds at most; see :func:`run_script`.

    Returns:
        The run, and whether the limit ended it; what was seen is in ``directory``.
    """
    from labutils.inspection.runner import run_observed

    path = find_script(script)
    call = (path, [str(value) for value in arguments], directory, virtual)
    packed = wire.pack_call(run_observed, call, {})
    run = _prepare(("call", {}), packed, path, ranks, nodes, timeout, quick, True)
    run.start_in_background()
    try:
        ended = run.done.wait(limit)
    finally:
        if run.running:
            run.stop()
    return run, not ended


def _prepare(
    message: tuple[str, dict[str, Any]], packed: wire.Packed | None, path: str, ranks: int,
    nodes: int, timeout: float | None, quick: bool, checked: bool,
) -> Run:  # fmt: skip
    """The run, with its ranks up; what they print is kept, not shown."""
    from labutils.launch.job import JobRanks  # not on every system

    check_timeout(timeout)
    world = World(ranks, nodes)
    started = Ranks(world) if quick else JobRanks(world)
    started.start(group=False)
    try:
        return Run(
            started, message, packed, timeout=timeout, title=os.path.basename(path),
            checked=checked, show=lambda _: None, colour=output.coloured(),
        )  # fmt: skip
    except BaseException:
        started.close(0)
        raise
