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
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils import hardware, notebooks
from labutils.batch_summary import read_outcome, read_results, write_summary
from labutils.batch_worker import FAILED, PASSED

MAX_GPUS = 64
STOPPED, NOT_RUN = "stopped", "not run"
_STOP_S = 5.0
_LEFT_OVER = (".task-*", "..task-*", ".summary.*")
"""Files that are there only while a run writes them, see ``write_whole`` for the names."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one lab went."""

    lab: str
    status: str
    """``passed``, ``failed``, ``timeout``, ``stopped`` or ``not run``."""
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
    timeout_s: int = notebooks.CELL_TIMEOUT_S,
    resume: bool = False,
) -> list[Result]:
    """Execute labs one after the other into ``out``; the summaries are kept up to date meanwhile.

    They name every lab from the start, so that a run that is killed leaves none out.
    ``timeout_s`` is the limit for one cell.  ``resume`` keeps what has passed already, if neither
    the lab nor labutils nor the parameters have changed since.
    """
    for path in labs:
        if path.resolve() == (out / path.name).resolve():
            raise ValueError(f"{out / path.name} is the lab itself; name another --out.")
    out.mkdir(parents=True, exist_ok=True)
    with _alone_in(out):
        before = {r["lab"]: Result(**r) for r in read_results(out)} if resume else {}
        results = [_at_first(path, before.get(path.stem), out, parameters) for path in labs]
        machine = hardware.describe()  # imports torch, which does not bear being interrupted
        try:
            for index, path in enumerate(labs):
                print(f"[{index + 1}/{len(labs)}] {path.stem} ...", flush=True)
                write_summary(out, results, parameters, machine)
                if results[index].status == PASSED:
                    print("      passed before, nothing has changed", flush=True)
                    continue
                fingerprint = _fingerprint(path, parameters)
                results[index] = run_lab(path, out / path.name, parameters, timeout_s, fingerprint)
                print(_line(results[index]), flush=True)
                if results[index].status == STOPPED:
                    raise KeyboardInterrupt
        finally:
            write_summary(out, results, parameters, machine)
    return results


def run_lab(
    path: Path,
    target: Path,
    parameters: Mapping[str, Any],
    timeout_s: int,
    fingerprint: str = "",
) -> Result:
    """Execute one lab; whatever happens in it, the answer is a :class:`Result`."""
    target.unlink(missing_ok=True)  # an earlier run's notebook must not pass for this one's
    task = {
        "lab": str(path), "target": str(target), "parameters": dict(parameters),
        "timeout_s": timeout_s,
    }  # fmt: skip
    answer = _work(task, target.parent)
    found = read_outcome(target)
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
        "--timeout",
        type=float,
        default=notebooks.CELL_TIMEOUT_S,
        help="seconds for one cell, rounded up to whole ones",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another parameter"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep labs that have passed and have not changed"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the labs; 0 only if every one of them passed."""
    parameters = {"gpus": arguments.gpus, **dict(map(_assignment, arguments.set))}
    gpus = parameters["gpus"]  # --set may name them, too
    if type(gpus) is not int or not 1 <= gpus <= MAX_GPUS:
        raise ValueError(f"--gpus must be a whole number from 1 to {MAX_GPUS}, not {gpus!r}.")
    if not 0 < arguments.timeout < math.inf:  # nan is not either
        raise ValueError(
            f"--timeout must be more than 0 seconds and finite, not {arguments.timeout:g}."
        )
    timeout_s = math.ceil(arguments.timeout)  # Jupyter's limit is in whole seconds
    labs = notebooks.find(arguments.folder, arguments.only)
    _demand_known([name for name in parameters if name != "gpus"], labs)
    with _stoppable():
        results = run_labs(labs, arguments.out, parameters, timeout_s, arguments.resume)
    failed = [result.lab for result in results if result.status != PASSED]
    print(f"{len(labs) - len(failed)} of {len(labs)} labs passed: {arguments.out / 'summary.html'}")
    return 1 if failed else 0


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C, and SIGTERM (a batch system's way to say stop), end what runs inside, once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, _interrupt)
    if before[signal.SIGINT] != signal.SIG_IGN:  # as it is for a shell's background job
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _interrupt:  # else this process is about to end
            for number, handler in before.items():
                signal.signal(number, handler)


def _interrupt(*signals: object) -> None:
    """Stop the run; an impatient second signal must not lose the summary, so it does nothing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _demand_known(names: Iterable[str], labs: Sequence[Path]) -> None:
    """A name that no lab knows is a slip of the pen; one that some lab lacks fails there."""
    known = dict.fromkeys(name for path in labs for name in _parameters(path))
    for name in names:
        if name not in known:
            there = f"there are: {', '.join(known)}" if known else "there are none"
            raise ValueError(f"--set: no lab asked for has a parameter {name!r}; {there}.")


def _parameters(path: Path) -> list[str]:
    import nbformat

    try:
        return notebooks.parameters(nbformat.read(path, as_version=4)) or []
    except Exception:  # a broken notebook fails when its turn comes
        return []


def _work(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Let a process of its own execute the lab; status, message and seconds."""
    from labutils.guard import python

    handle, name = tempfile.mkstemp(dir=folder, prefix=".task-", suffix=".json")
    file = Path(name)
    start = time.monotonic()
    try:
        os.close(handle)
        notebooks.write_whole(file, json.dumps(task))
        # Progress is the learner's, and other runs share this machine: this lab has its own.
        environment = {**os.environ, "LABUTILS_DATA": str(folder / ".progress")}
        worker = python("labutils.batch_worker:main", name)
        status = _run_guarded(worker, environment)
        seconds = round(time.monotonic() - start, 1)
        if status == STOPPED:
            return {"status": STOPPED, "message": "the run was stopped here", "seconds": seconds}
        answer: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # of a worker that ended in writing it
            answer = json.loads(file.read_text())
        if "status" not in answer:
            return {"status": FAILED, "message": f"its process ended: {status}", "seconds": seconds}
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


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Two runs that write to one folder would mix their results.

    What a run that was killed left half-written is removed: nobody else can be writing it.
    """
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
        for pattern in _LEFT_OVER:
            for file in out.glob(pattern):
                file.unlink()
        yield


def _at_first(
    path: Path, before: Result | None, out: Path, parameters: Mapping[str, Any]
) -> Result:
    """A lab's entry before its turn: that of an earlier run if it still holds, or "not run"."""
    holds = before is not None and before.status == PASSED and (out / before.notebook).is_file()
    if before and holds and before.fingerprint == _fingerprint(path, parameters):
        return before
    return Result(path.stem, NOT_RUN, 0.0, "it had not ended when this summary was written")


def _fingerprint(path: Path, parameters: Mapping[str, Any]) -> str:
    try:
        return notebooks.fingerprint(path, parameters)
    except ValueError:  # no notebook at all: it fails when its turn comes
        return ""


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
