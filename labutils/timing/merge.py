"""Several ranks, each recorded by its own process, played together.

Ranks meet in collectives, which are the same on all of them by group and number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..trace import Trace
from ..virtual.record import Collective, Copy, Entry, Graph
from .profiles import Profile
from .schedule import Scheduler


def merge(graphs: Sequence[Graph], profile: Profile, per_node: int | None = None) -> Trace:
    """The trace of ranks 0, 1, … of which ``graphs`` holds the recordings, one GPU each.

    Args:
        per_node: ranks on one node, where there are several; the profile's GPUs if None.

    Raises:
        ValueError: there is no recording, or one in which several GPUs work.
    """
    if not graphs:
        raise ValueError("There is no recording to merge: pass one graph per rank.")
    devices = [_device(graph, rank) for rank, graph in enumerate(graphs)]
    pairs = list(zip(graphs, devices, strict=True))
    player = Scheduler(
        profile,
        len(graphs),
        [g.allocated[d] if d < len(g.allocated) else 0 for g, d in pairs],
        [g.capacity[d] if d < len(g.capacity) else 0 for g, d in pairs],
        merged=True,
        per_node=per_node,
    )
    numbers = 0
    for rank, graph in enumerate(graphs):
        player.feed(_relabelled(graph, rank, numbers))
        numbers += len(graph.entries)
    player.finish()
    return player.trace(sum(graph.dropped for graph in graphs))


def _device(graph: Graph, rank: int) -> int:
    """The one virtual GPU that a rank works on."""
    used = {e.device for e in graph.entries if e.kernel is not None and e.device >= 0}
    if len(used) > 1:
        raise ValueError(
            f"Rank {rank} works on {len(used)} GPUs ({sorted(used)}), but ranks that are merged "
            "have one each."
        )
    return used.pop() if used else 0


def _relabelled(graph: Graph, rank: int, first: int) -> Iterator[Entry]:
    """The entries with this rank's number on threads, devices and events.

    Args:
        first: number of the graph's first entry among those of all ranks.
    """
    prefix = f"rank {rank}/"
    for entry in graph.entries:
        device = rank if entry.device >= 0 else -1
        thread = prefix + entry.thread
        ref = entry.ref
        if entry.what in ("fork", "join"):
            ref = prefix + ref
        elif entry.what in ("record", "wait"):
            ref = (rank, ref)
        elif entry.what == "sync" and ref and ref[0] == "event":
            ref = ("event", (rank, ref[1]))
        elif entry.what == "after":
            ref = ref - graph.first + first if ref >= graph.first else first
        elif isinstance(ref, Copy):
            ends = {-1: -1}
            ref = ref._replace(source=ends.get(ref.source, rank), target=ends.get(ref.target, rank))
        elif isinstance(ref, Collective) and not ref.group:
            ref = ref._replace(devices=(rank,))
        yield entry._replace(thread=thread, device=device, ref=ref)


__all__ = ["merge"]
