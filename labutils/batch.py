"""``labutils run labs --gpus 8 --out results``: the labs executed without a browser.

Each lab becomes one executed notebook with its figures; ``summary.json`` and ``summary.html`` say
what happened.  A lab that fails does not stop the others, and the exit code is 0 only if each lab
ran to its last cell.  However the run ends, nothing that it started stays behind.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils import notebooks
from labutils.batch_summary import read_results, write_summary
from labutils.batch_worker import FAILED, PASSED

MAX_GPUS = 64
STOPPED = "stopped"
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """How one lab went."""

    lab: str
    status: str
    """``passed``, ``failed``, ``timeout`` or ``stopped``."""
    seconds: float
    message: str = ""
    """What went wrong, in one line."""
    notebook: str = ""
    """File name of the executed notebook, beside the summary."""
    exercises: dict[str, str] = field(default_factory=dict)
    """The verdict on each exercise, as the notebook shows it."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """Key figures, see :mod:`labutils.key_figures`."""
    fingerprint: str = ""
    """Of all that the lab was made from; the same again need not be run again."""


def run_labs(
    labs: Sequence[Path],
    out: Path,
    parameters: Mapping[str, Any],
    timeout_s: float = notebooks.CELL_TIMEOUT_S,
    resume: bool = False,
) -> list[Result]:
    """Execute labs one after the other into ``out``; the summaries are kept up to date meanwhile.

    ``timeout_s`` is the limit for one cell.  ``resume`` keeps what has passed already, if neither
    the lab nor labutils nor the parameters have changed since.
    """
    for path in labs:
        if path.resolve() == (out / path.name).resolve():
            raise ValueError(f"{out / path.name} is the lab itself; name another --out.")
    out.mkdir(parents=True, exist_ok=True)
    with _alone_in(out):
        before = {r["lab"]: Result(**r) for r in read_results(out)} if resume else {}
        results: list[Result] = []
        for number, path in enumerate(labs, 1):
            print(f"[{number}/{len(labs)}] {path.stem} ...", flush=True)
            fingerprint = notebooks.fingerprint(path, parameters)
            result = before.get(path.stem)
            if result and _still_holds(result, fingerprint, out):
                print("      passed before, nothing has changed", flush=True)
            else:
                result = run_lab(path, out / path.name, parameters, timeout_s, fingerprint)
                print(_line(result), flush=True)
            results.append(result)
            write_summary(out, results, parameters)
            if result.status == STOPPED:
                raise KeyboardInterrupt
    return results


def run_lab(
    path: Path,
    target: Path,
    parameters: Mapping[str, Any],
    timeout_s: float,
    fingerprint: str = "",
) -> Result:
    """Execute one lab; whatever happens in it, the answer is a :class:`Result`."""
    target.unlink(missing_ok=True)  # an earlier run's notebook must not pass for this one's
    task = {
        "lab": str(path), "target": str(target), "parameters": dict(parameters),
        "timeout_s": timeout_s,
    }  # fmt: skip
    answer = _work(task, target.parent)
    found = _outcome(target)
    return Result(
        path.stem,
        notebook=target.name if target.exists() else "",
        fingerprint=fingerprint,
        **answer,
        **found,
    )


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
    parser.add_argument(
        "--resume", action="store_true", help="keep labs that have passed and have not changed"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the labs; 0 only if every one of them passed."""
    if not 1 <= arguments.gpus <= MAX_GPUS:
        raise ValueError(f"--gpus must be from 1 to {MAX_GPUS}, not {arguments.gpus}.")
    if arguments.timeout <= 0:
        raise ValueError(f"--timeout must be more than 0 seconds, not {arguments.timeout:g}.")
    parameters = {"gpus": arguments.gpus, **dict(map(_assignment, arguments.set))}
    labs = notebooks.find(arguments.folder, arguments.only)
    signal.signal(signal.SIGTERM, _interrupt)  # a batch system's way to say stop
    results = run_labs(labs, arguments.out, parameters, arguments.timeout, arguments.resume)
    failed = [result.lab for result in results if result.status != PASSED]
    print(f"{len(labs) - len(failed)} of {len(labs)} labs passed: {arguments.out / 'summary.html'}")
    return 1 if failed else 0


def _interrupt(*signal: object) -> None:
    raise KeyboardInterrupt


def _work(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Let a process of its own execute the lab; status, message and seconds."""
    from labutils.guard import python

    handle, name = tempfile.mkstemp(dir=folder, prefix=".task-", suffix=".json")
    file = Path(name)
    try:
        os.close(handle)
        file.write_text(json.dumps(task))
        # Progress is the learner's, and other runs share this machine: this lab has its own.
        environment = {**os.environ, "LABUTILS_DATA": str(folder / ".progress")}
        worker = python("labutils.batch_worker:main", name)
        status = _run_guarded(worker, environment)
        if status == STOPPED:
            return {"status": STOPPED, "message": "the run was stopped here", "seconds": 0.0}
        answer: dict[str, Any] = json.loads(file.read_text())
        if "status" not in answer:
            return {"status": FAILED, "message": f"its process ended: {status}", "seconds": 0.0}
        return answer
    finally:
        file.unlink(missing_ok=True)


def _run_guarded(command: list[str], environment: dict[str, str]) -> str:
    """Run a command that ends, with all below it, when this process does."""
    from labutils.guard import python

    guarded = python("labutils.guard:main", os.getpid(), "--", *command)
    with subprocess.Popen(
        guarded, stdin=subprocess.PIPE, env=environment, start_new_session=True
    ) as guard:
        try:
            return f"exit code {guard.wait()}"
        except KeyboardInterrupt:
            assert guard.stdin is not None
            guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(_STOP_S)
            return STOPPED
        finally:
            guard.kill()


def _outcome(target: Path) -> dict[str, Any]:
    """What the executed notebook shows, as far as it can be read."""
    if not target.exists():
        return {}
    import nbformat

    from labutils import outcome

    try:
        found = outcome.read(nbformat.read(target, as_version=4))
    except Exception:  # written in part, by a lab that was stopped
        return {}
    return {"exercises": found.exercises, "figures": found.figures}


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Two runs that write to one folder would mix their results."""
    try:
        import fcntl
    except ImportError:  # Windows: no locks that end with their process
        yield
        return
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another run is writing to {out}: name another --out.") from None
        yield


def _still_holds(result: Result, fingerprint: str, out: Path) -> bool:
    same = result.status == PASSED and result.fingerprint == fingerprint
    return same and (out / result.notebook).is_file()


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"--set takes NAME=VALUE, not {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _line(result: Result) -> str:
    why = f": {result.message}" if result.message else ""
    return f"      {result.status} in {result.seconds:.0f} s{why}"
