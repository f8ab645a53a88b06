"""What an inspection finds: mistakes and remarks, each with its place, evidence and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils.launch.run import Run
from labutils.launch.verdict import names


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing (``mistake=False``)."""

    kind: str
    """A short name: "no-sampler", "diverged", …"""
    what: str
    evidence: str
    remedy: str
    where: str = ""
    """``file, line n``"""
    ranks: tuple[int, ...] = ()
    mistake: bool = True

    @property
    def place(self) -> str:
        """E.g. ``train.py, line 12, ranks 0 and 1``."""
        file, _, line = self.where.rpartition(", line ")
        parts = [f"{Path(file).name}, line {line}"] if file else []
        return ", ".join(parts + ([names(list(self.ranks)).lower()] if self.ranks else []))


@dataclass
class Seen:
    """The facts of all ranks, and the run that they are from."""

    run: Run
    ranks: list[dict[str, Any]]
    """One per rank that left any, in rank order."""
    stopped: bool = False
    """Whether the time limit ended it."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.run.ranks.world.size

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(facts["rank"] for facts in self.ranks)

    def places(self, kind: str) -> str:
        """The first line at which such a fact was seen, on any rank."""
        return next((fact["where"] for facts in self.ranks for fact in facts[kind]), "")

    def steps(self) -> list[list[dict[str, Any]]]:
        """The optimizer steps that every rank has finished: ``[number][rank]``."""
        done = [[s for s in facts["steps"] if "after" in s] for facts in self.ranks]
        return [list(step) for step in zip(*done)]

    @property
    def diverged(self) -> bool:
        """Whether the parameters differed when they were looked at last.

        Not looked at where ranks hold shards by design, or where ``Join`` lets them make unequal
        numbers of steps.
        """
        if any(f["joined"] or any(s["sharded"] for s in f["steps"]) for f in self.ranks):
            return False
        looked = [step for step in self.steps() if step[0]["after"] is not None]
        return bool(looked) and not alike(looked[-1], "after")


def alike(facts: Sequence[dict[str, Any]], key: str) -> bool:
    """Whether a fact is the same on all ranks."""
    return all(fact[key] == facts[0][key] for fact in facts[1:])
