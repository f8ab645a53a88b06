"""What a rank asked of its virtual GPU, kept for a simulated timeline of all ranks together."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from pathlib import Path

from labutils.trace import Trace
from labutils.virtual.record import Graph
from labutils.virtual.state import state

LONGEST = 100_000
"""Operations of a rank beyond which a run is too long to be kept."""


class Stretch:
    """The recorder's log of one run, in a rank: from here until :meth:`save`."""

    def __init__(self, directory: str, rank: int) -> None:
        self.path = graph_file(directory, rank)
        self.first = state.recorder.count
        self.allocated = tuple(state.ledger.allocated)

    def save(self) -> None:
        """Write what was recorded since; nothing where no virtual GPU was used."""
        entries, lost = state.recorder.since(self.first)
        if not state.devices or not entries or lost or len(entries) > LONGEST:
            return
        capacity = tuple(state.ledger.capacity)
        graph = Graph(entries, self.first, state.devices, self.allocated, capacity, state.profile)
        with contextlib.suppress(OSError):
            self.path.write_bytes(pickle.dumps(graph))


def graph_file(directory: str, rank: int) -> Path:
    """Where ``rank`` keeps its graph."""
    return Path(directory) / f"graph-{rank}.pickle"


def simulate(directory: str, ranks: Sequence[int], profile: str = "", fabric: str = "") -> Trace:
    """The simulated trace of ``ranks``, which meet in their collectives.

    Args:
        directory: the run's.
        profile: hardware to play them on; what their GPUs imitated if "".
        fabric: the network between nodes, for more ranks than one node of the profile has.

    Raises:
        ValueError: a rank kept no graph, or the profile is unknown.
    """
    from labutils.timing import profiles  # here, since ranks need only what is above
    from labutils.timing.merge import merge

    files = [graph_file(directory, rank) for rank in ranks]
    missing = [str(r) for r, file in zip(ranks, files) if not directory or not file.is_file()]
    if missing:
        raise ValueError(
            f"There is nothing to simulate: rank {', '.join(missing)} recorded no operation on a "
            f"virtual GPU, or more than {LONGEST:,}. Put tensors and model on lab.device()."
        )
    graphs = [pickle.loads(file.read_bytes()) for file in files]
    return merge(graphs, profiles.load(profile or graphs[0].profile, fabric=fabric or None))
