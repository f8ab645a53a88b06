"""Looking at a user's own DDP script while it runs, and saying which mistakes can be seen."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labutils.inspection.report import Report
    from labutils.launch.run import Run


def bring_your_own(
    script: str | os.PathLike[str],
    ranks: int = 2,
    args: Sequence[object] = (),
    *,
    nodes: int = 1,
    limit: float = 120.0,
    timeout: float = 60.0,
    quick: bool = False,
    virtual: bool = False,
) -> Report:
    """Run a DDP script, unchanged, under torchrun, and report the mistakes that can be seen.

    Process group, samplers, DDP, optimizers and checkpoints are observed in every rank.  A clean
    report means that none of the known mistakes was seen in this run, not that there is none.  To
    see whether GPUs are chosen by the local rank, rehearse two nodes: ``nodes=2``.

    Args:
        script: a Python file that trains; give it little to do.
        ranks: processes per node.
        args: its command line.
        nodes: nodes, rehearsed on this machine.
        limit: seconds after which it is ended, and reported as far as it came.
        timeout: seconds without any progress after which it is taken to hang.
        virtual: let virtual GPUs stand in for CUDA, so that a script that insists on CUDA runs on a
            machine without (``torch.cuda.is_available()`` is true in it).
        quick: fork the ranks from the lab's server; starts sooner than torchrun does.

    Returns:
        The :class:`~labutils.inspection.report.Report`: ``ok``, ``findings``, ``remarks``,
        ``text()``; a notebook shows it as it is.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: the numbers make no sense, or the machine has no room for the ranks.
    """
    from labutils.inspection import rules_data, rules_run, rules_training
    from labutils.inspection.findings import Seen
    from labutils.inspection.report import Report
    from labutils.inspection.start import observe_script

    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise ValueError(f"args must be a list of arguments, not {args!r}: write args=[{args!r}].")
    if not limit > 0:
        raise ValueError(f"limit must be a number of seconds above 0, not {limit!r}.")
    with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
        run, stopped = observe_script(
            script, args, folder, ranks=ranks, nodes=nodes, limit=limit, timeout=timeout,
            quick=quick, virtual=virtual,
        )  # fmt: skip
        seen = Seen(run, _replicas(_facts(run, folder)), stopped)
    for rules in (rules_data, rules_training, rules_run):
        for finding in rules.find(seen):
            seen.findings.append(finding)
    return Report(Path(script).name, seen)


def _facts(run: Run, folder: str) -> list[dict[str, Any]]:
    """What the ranks have left; of one that was killed at once there is nothing."""
    from labutils.inspection.facts import facts_file

    files = [facts_file(folder, rank) for rank in range(run.ranks.world.size)]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def _replicas(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ranks that DDP makes replicas: with other kinds of parallelism besides, not all."""
    models = ranks[0]["models"] if ranks else []
    members = models[0]["members"] if models else range(1 << 30)
    return [facts for facts in ranks if facts["rank"] in members]


__all__ = ["bring_your_own"]
