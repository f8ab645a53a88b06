"""What a batch run leaves beside its notebooks: ``summary.json`` and ``summary.html``."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labutils import notebooks, pages
from labutils.grading import SOLVED

if TYPE_CHECKING:
    from labutils.batch import Result
    from labutils.hardware import Machine

PACKAGES = ("labutils", "torch", "numpy", "jupyterlab", "ipykernel", "papermill")
"""Whose versions the summary names."""
_MARKS = {"passed": "✔", "not run": "–"}


def write_summary(
    out: Path, results: Sequence[Result], parameters: Mapping[str, Any], machine: Machine
) -> None:
    """Write ``summary.json`` and ``summary.html`` into ``out``, each at one stroke.

    ``results`` has every lab asked for, also those not run: "passed" means that all of them did.
    """
    versions = {name: _version(name) for name in PACKAGES}
    summary = {
        "passed": all(result.status == "passed" for result in results),
        "parameters": dict(parameters),
        "versions": versions,
        "machine": asdict(machine),
        "results": [asdict(result) for result in results],
    }
    notebooks.write_whole(out / "summary.json", json.dumps(summary, indent=1, default=str) + "\n")
    passed = sum(result.status == "passed" for result in results)
    title = f"{passed} of {len(results)} labs passed"
    told = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
    body = [
        pages.table(("Lab", "Result", "Seconds", "Exercises solved", "What went wrong"),
              map(_row, results)),
        "<h2>Key figures</h2>", _figures(results),
        f"<h2>Made with</h2><p>{html.escape(told)}</p>",
        f"<p>{html.escape(', '.join(f'{name} {number}' for name, number in versions.items()))}</p>",
        f"<pre>{html.escape(machine.summary())}</pre>",
    ]  # fmt: skip
    notebooks.write_whole(out / "summary.html", pages.page(title, *body))


def read_results(out: Path) -> list[dict[str, Any]]:
    """The results of the run before in this folder; none where there is no readable summary."""
    try:
        return list(json.loads((out / "summary.json").read_text())["results"])
    except (OSError, ValueError, KeyError):
        return []


def read_outcome(executed: Path) -> dict[str, Any]:
    """What an executed notebook shows (exercises and figures), as far as it can be read."""
    if not executed.exists():
        return {}
    import nbformat

    from labutils import outcome

    try:
        found = outcome.read(nbformat.read(executed, as_version=4))
    except Exception:  # written in part, by a lab that was stopped
        return {}
    return {"exercises": found.exercises, "figures": found.figures}


def _row(result: Result) -> tuple[str, ...]:
    name = html.escape(result.lab)
    if result.notebook:
        name = f'<a href="{html.escape(result.notebook)}">{name}</a>'
    mark = f"{_MARKS.get(result.status, '✘')} {result.status}"
    seconds = "" if result.status == "not run" else f"{result.seconds:.0f}"
    solved = sum(state == SOLVED for state in result.exercises.values())
    checks = f"{solved} of {len(result.exercises)}" if result.exercises else "none checked"
    return name, mark, seconds, checks, html.escape(result.message)


def _figures(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for figure in result.figures:
            limits = figure["expected"]
            expected = f"{limits[0]:g} to {limits[1]:g}" if limits else "no range known"
            verdict = "" if not limits else "✔ within" if figure["within"] else "✘ outside"
            value = f"{figure['value']:.4g} {figure['unit']}"
            rows.append(map(html.escape, (
                result.lab, figure["name"], value, figure["source"], expected, verdict,
            )))  # fmt: skip
    if not rows:
        return "<p>None of these labs has published one.</p>"
    head = ("Lab", "Figure", "Value", "", "Expected of this hardware", "")
    return pages.table(head, rows)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
