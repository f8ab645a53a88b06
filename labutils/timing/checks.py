"""What can be wrong with a question to ``lab.predict``, a sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import profiles
from .profiles import Profile
from .tables import unknown

WORLD = 1 << 20
"""The most GPUs of all nodes together."""
MOST = {"batch": 1_000_000, "accumulate": 1_000, "seq": 1_000_000, "gpus": WORLD, "nodes": WORLD}
"""The largest number that is answered: of passes, since each is played; of others, since nobody has
more, so that it is a slip."""


def counts(**values: Any) -> None:
    """Whole numbers, 1 or more, and not absurdly many."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, but is {value!r}.")
        if value > MOST[name]:
            raise ValueError(f"{name} must be at most {MOST[name]:,}, but is {value:,}.")


def worlds(values: Sequence[Any]) -> None:
    """Numbers of GPUs of a scaling curve."""
    for value in values:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= value <= WORLD:
            raise ValueError(
                f"worlds must be whole numbers of GPUs, from 1 to {WORLD:,}, but one is {value!r}."
            )


def keywords(function: str, asked: Mapping[str, Any], known: Sequence[str]) -> None:
    """Arguments that a function of DDP passes on to a prediction."""
    for name in asked:
        if name == "strategy":
            raise ValueError(f"{function} is about 'ddp' and takes no strategy: ask lab.predict.")
        if name not in known:
            raise ValueError(unknown(f"argument of {function}", name, list(known)))


def choice(what: str, value: Any, known: Sequence[str]) -> None:
    """One of the known names."""
    if value not in known:
        raise ValueError(unknown(what, str(value), list(known)))


def limits(**values: Any) -> None:
    """Sizes in MiB, 0 or more."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise ValueError(f"{name} must be a number of MiB, 0 or more, but is {value!r}.")


def place(strategy: str, gpus: int, nodes: int, batch: int, profile: Profile) -> None:
    """GPUs and nodes that there are, connected, and of use to the strategy."""
    if strategy != "ddp" and nodes > 1:
        raise ValueError(f"{strategy!r} runs in one process: nodes must be 1, but is {nodes}.")
    if strategy == "single" and gpus > 1:
        raise ValueError(f"'single' uses one GPU, but gpus is {gpus}: choose 'ddp' or 'dp'.")
    if gpus * nodes > WORLD:
        raise ValueError(f"{nodes:,} nodes of {gpus} GPUs are more than {WORLD:,} GPUs in all.")
    if gpus > profile.gpus:
        raise ValueError(
            f"A node of {profile.name} has {profile.gpus} GPUs, but gpus is {gpus}: add nodes."
        )
    if strategy == "dp" and batch < gpus:
        raise ValueError(f"'dp' divides the batch: {batch} samples do not reach {gpus} GPUs.")
    if nodes > 1 and profile.fabric is None:
        known = ", ".join(profiles.fabrics())
        raise ValueError(f"{nodes} nodes need a fabric between them: choose one of {known}.")


def seconds_per_batch(loader: float | str | None, batch: int) -> float:
    """Seconds in which a loader delivers a batch; 0 without one."""
    if loader is None:
        return 0.0
    try:
        rate = isinstance(loader, str) and loader.endswith("/s")
        value = float(str(loader).removesuffix("/s"))
        if not 0 < value < 1e12:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"loader is {loader!r}, but must be seconds per batch, e.g. 0.05, or a text such as "
            "'1200/s' for samples per second."
        ) from None
    return batch / value if rate else value


__all__ = ["choice", "counts", "keywords", "limits", "place", "seconds_per_batch", "worlds"]
