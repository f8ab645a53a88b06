"""``labutils run labs --gpus 8 --out results``: the labs executed without a browser.

Each lab becomes one executed notebook with its figures; ``summary.json`` and ``summary.html`` say
what happened.  A lab that fails does not stop the others, and the exit code is 0 only if each lab
ran to its last cell.
"""

from __future__ import annotations

import argparse
import ast
import html
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labutils import notebooks

MAX_GPUS = 64


@dataclass(frozen=True, slots=True)
class Result:
    """How one lab went."""

    lab: str
    status: str
    """``passed``, ``failed`` or ``timeout``."""
    seconds: float
    message: str = ""
    """What went wrong, in one line."""
    notebook: str = ""
    """File name of the executed notebook, beside the summary."""


def run_labs(
    labs: Sequence[Path],
    out: Path,
    parameters: Mapping[str, Any],
    timeout_s: float = notebooks.CELL_TIMEOUT_S,
) -> list[Result]:
    """Execute labs one after the other into ``out``; the summaries are kept up to date meanwhile.

    ``timeout_s`` is the limit for one cell.
    """
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for number, path in enumerate(labs, 1):
        print(f"[{number}/{len(labs)}] {path.stem} ...", flush=True)
        result = run_lab(path, out / path.name, parameters, timeout_s)
        print(_line(result), flush=True)
        results.append(result)
        write_summary(out, results, parameters)
    return results


def run_lab(path: Path, target: Path, parameters: Mapping[str, Any], timeout_s: float) -> Result:
    """Execute one lab; whatever happens in it, the answer is a :class:`Result`."""
    if path.resolve() == target.resolve():
        raise ValueError(f"{target} is the lab itself; name another folder for the results.")
    target.unlink(missing_ok=True)  # an earlier run's notebook must not pass for this one's
    start = time.monotonic()
    status, message = "passed", ""
    try:
        _execute(path, target, parameters, timeout_s)
    except Exception as error:
        status, message = _explain(error, timeout_s)
    written = target.name if target.exists() else ""
    return Result(path.stem, status, round(time.monotonic() - start, 1), message, written)


def write_summary(out: Path, results: Sequence[Result], parameters: Mapping[str, Any]) -> None:
    """Write ``summary.json`` and ``summary.html`` into ``out``."""
    from labutils.hardware import describe

    machine = describe()
    summary = {
        "passed": all(result.status == "passed" for result in results),
        "parameters": dict(parameters),
        "machine": asdict(machine),
        "results": [asdict(result) for result in results],
    }
    notebooks.write_whole(out / "summary.json", json.dumps(summary, indent=1, default=str) + "\n")
    notebooks.write_whole(out / "summary.html", _page(results, parameters, machine.summary()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``labutils run``."""
    parser.add_argument("folder", type=Path, help="folder of the labs, or one notebook")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs in each lab (default 4)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results")
    parser.add_argument("--only", metavar="02,03", help="only these labs")
    parser.add_argument(
        "--timeout", type=float, default=notebooks.CELL_TIMEOUT_S, help="seconds for one cell"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another parameter"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the labs; 0 only if every one of them passed."""
    if not 1 <= arguments.gpus <= MAX_GPUS:
        raise ValueError(f"--gpus must be from 1 to {MAX_GPUS}, not {arguments.gpus}.")
    if arguments.timeout <= 0:
        raise ValueError(f"--timeout must be more than 0 seconds, not {arguments.timeout:g}.")
    parameters = {"gpus": arguments.gpus, **dict(map(_assignment, arguments.set))}
    labs = notebooks.find(arguments.folder, arguments.only)
    results = run_labs(labs, arguments.out, parameters, arguments.timeout)
    failed = [result.lab for result in results if result.status != "passed"]
    print(f"{len(labs) - len(failed)} of {len(labs)} labs passed: {arguments.out / 'summary.html'}")
    return 1 if failed else 0


def _execute(path: Path, target: Path, parameters: Mapping[str, Any], timeout_s: float) -> None:
    import nbformat
    import papermill

    known = notebooks.parameters(nbformat.read(path, as_version=4))
    if known is None:
        raise ValueError("no cell is tagged 'parameters', so nothing can be set from outside")
    for name in parameters:
        if name not in known:
            raise ValueError(f"there is no parameter {name!r}; there are: {', '.join(known)}")
    executed = papermill.execute_notebook(
        str(path),
        str(target),
        dict(parameters),
        kernel_name=notebooks.KERNELSPEC["name"],
        cwd=str(path.parent),
        progress_bar=sys.stderr.isatty(),
        execution_timeout=timeout_s,
        extra_arguments=notebooks.KERNEL_ARGUMENTS,
    )
    _demand_complete(executed)


def _demand_complete(notebook: Any) -> None:
    """Papermill takes ``sys.exit(0)`` in a cell for success, though no later cell runs."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            raise ValueError(f"cell {number} was never executed: an earlier one left the notebook")
    for number, message in notebooks.errors(notebook):
        raise ValueError(f"cell {number}: {message}")


def _explain(error: Exception, timeout_s: float) -> tuple[str, str]:
    """Status and one line for what stopped a lab."""
    if type(error).__name__ == "CellTimeoutError":
        return "timeout", f"a cell took longer than {timeout_s:g} s"
    if type(error).__name__ == "PapermillExecutionError":
        count, name, value = (getattr(error, key) for key in ("exec_count", "ename", "evalue"))
        return "failed", f"in [{count}]: {name}: {_first_line(value)}"
    return "failed", _first_line(str(error)) or type(error).__name__


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"--set takes NAME=VALUE, not {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _line(result: Result) -> str:
    why = f": {result.message}" if result.message else ""
    return f"      {result.status} in {result.seconds:.0f} s{why}"


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .3em .8em; border-bottom: 1px solid #ccc }}
</style>
<h1>{title}</h1>
<table>
<tr><th>Lab</th><th>Result</th><th>Seconds</th><th>What went wrong</th></tr>
{rows}
</table>
<p>Parameters: {parameters}</p>
<pre>{machine}</pre>
</html>
"""


def _page(results: Sequence[Result], parameters: Mapping[str, Any], machine: str) -> str:
    passed = sum(result.status == "passed" for result in results)
    return _PAGE.format(
        title=f"{passed} of {len(results)} labs passed",
        rows="\n".join(map(_row, results)),
        parameters=html.escape(", ".join(f"{k} = {v!r}" for k, v in parameters.items())),
        machine=html.escape(machine),
    )


def _row(result: Result) -> str:
    name = html.escape(result.lab)
    if result.notebook:
        name = f'<a href="{html.escape(result.notebook)}">{name}</a>'
    mark = {"passed": "✔ passed", "failed": "✘ failed"}.get(result.status, "✘ " + result.status)
    cells = (name, mark, f"{result.seconds:.0f}", html.escape(result.message))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
