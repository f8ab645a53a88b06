"""The report of an inspection, as text and as rich HTML."""

from __future__ import annotations

import html
import linecache
import statistics
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from labutils.colours import KIND_STYLES
from labutils.inspection.findings import Finding, Seen

_WIDTH = 96


class Report:
    """What was found in a script.  ``findings`` are mistakes, ``remarks`` worth knowing."""

    def __init__(self, title: str, seen: Seen) -> None:
        self.title, self.run = title, seen.run
        self.findings = [finding for finding in seen.findings if finding.mistake]
        self.remarks = [finding for finding in seen.findings if not finding.mistake]
        self.rows = [list(map(str, row)) for row in _timing(seen)]
        self.logs = seen.run.logs
        world = seen.run.ranks.world
        self._about = f"{world.size} ranks" + f" on {world.nodes} nodes" * (world.nodes > 1)

    @property
    def ok(self) -> bool:
        """Whether no mistake was seen."""
        return not self.findings

    @property
    def kinds(self) -> set[str]:
        """The kinds of the mistakes."""
        return {finding.kind for finding in self.findings}

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        number = len(self.findings)
        found = f"{number} mistake{'s' * (number != 1)}" if number else "no mistake seen"
        return f"{self.title} on {self._about}: {found}"

    def text(self) -> str:
        """Everything, for a terminal."""
        lines = [self.headline]
        for number, finding in enumerate(self.findings, 1):
            lines += ["", f"{number}. {finding.what}.", *_paragraphs(finding)]
        for finding in self.remarks:
            lines += ["", f"Worth knowing: {finding.what}.", *_paragraphs(finding)]
        if self.rows:
            lines += ["", *_columns([_HEAD, *self.rows]), f"({_MEASURED})"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(self.headline)}</b></p>"]
        parts += [_card(finding) for finding in [*self.findings, *self.remarks]]
        if self.rows:
            head = "".join(f"<th>{html.escape(name)}</th>" for name in _HEAD)
            rows = ("".join(f"<td>{html.escape(value)}</td>" for value in row) for row in self.rows)
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
            parts.append(f"<div>{_MEASURED}</div>")
        return "".join(parts)


def _source(finding: Finding) -> str:
    file, _, number = finding.where.rpartition(", line ")
    return linecache.getline(file, int(number)).strip() if file and number.isdigit() else ""


def _paragraphs(finding: Finding) -> list[str]:
    source = _source(finding)
    lines = [f"   {finding.place}" + f": {source}" * bool(source)] if finding.place else []
    for name, words in (("Seen", finding.evidence), ("To do", finding.remedy)):
        first, *rest = words.split("\n")
        lines += textwrap.wrap(
            f"{name}: {first}", _WIDTH, initial_indent="   ", subsequent_indent="     "
        )
        lines += [f"     {line}" for line in rest]
    return lines


def _card(finding: Finding) -> str:
    """A finding with a coloured edge; mistakes and remarks also differ in their first word."""
    style = KIND_STYLES["communication" if finding.mistake else "forward"]
    word = "Mistake" if finding.mistake else "Worth knowing"
    source = _source(finding)
    place = f"<div>{html.escape(finding.place)}</div>" * bool(finding.place)
    place += f"<pre style='margin:4px 0'>{html.escape(source)}</pre>" * bool(source)
    first, _, rest = finding.evidence.partition("\n")
    more = f"<pre style='margin:4px 0'>{html.escape(rest.strip())}</pre>" * bool(rest.strip())
    return (
        f"<div style='border-left:4px solid {style.colour};padding:2px 0 2px 10px;margin:10px 0'>"
        f"<div><b>{word}: {html.escape(finding.what)}</b></div>{place}"
        f"<div>Seen: {html.escape(first)}</div>{more}"
        f"<div>To do: {html.escape(finding.remedy)}</div></div>"
    )


_MEASURED = "measured on this machine, under observation, which costs time"
_HEAD = [
    "rank",
    "steps",
    "ms per step (median)",
    "of it waiting for data",
    "first loss given to backward()",
    "last",
]


def _timing(seen: Seen) -> Iterator[list[Any]]:
    """A row per rank that trained; measured on this machine, under observation."""
    for facts in seen.ranks:
        times = [step["time"] for step in facts["steps"] if "time" in step]
        gaps = [after - before for before, after in pairwise(times)]
        if not gaps:
            continue
        median = statistics.median(gaps)
        waiting = min(1.0, facts["waited_s"] / max(1e-9, sum(gaps)))
        losses = [f"{loss:.4g}" for loss in (*facts["losses"][:1], *facts["losses"][-1:])]
        yield [facts["rank"], len(times), f"{1e3 * median:.1f}", f"{waiting:.0%}", *losses]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(v.rjust(w) for v, w in zip(row, widths)) for row in rows]
