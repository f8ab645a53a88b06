"""One lab of a batch run, executed in a process of its own.

``labutils run`` starts it under the guard of :mod:`labutils.guard`, so that the kernel and
its ranks end with the batch run, however that ends.  Its answer is a file: status, message and
seconds.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labutils import notebooks

PASSED, FAILED, TIMEOUT = "passed", "failed", "timeout"


def main() -> None:
    """Entry point: ``FILE`` holds what is to be done and takes the answer."""
    file = Path(sys.argv[1])
    task = json.loads(file.read_text())
    start = time.monotonic()
    status, message = PASSED, ""
    try:
        _execute(Path(task["lab"]), Path(task["target"]), task["parameters"], task["timeout_s"])
    except Exception as error:
        status, message = _explain(error, task)
    answer = {"status": status, "message": message, "seconds": round(time.monotonic() - start, 1)}
    file.write_text(json.dumps(answer))  # in place of the task: on a full disk there is no other


def _execute(path: Path, target: Path, parameters: Mapping[str, Any], timeout_s: int) -> None:
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
        config=_kernel_config(),
    )
    _demand_complete(executed)


def _kernel_config() -> Any:
    """Talk to the kernel through names rather than ports, which another run might take meanwhile.

    The "@" makes them Linux's abstract sockets, which leave no file behind.
    """
    from traitlets.config import Config

    if sys.platform != "linux":
        return Config()
    return Config({"KernelManager": {"transport": "ipc", "ip": f"@labutils-{uuid.uuid4()}"}})


def _demand_complete(notebook: Any) -> None:
    """Papermill takes ``sys.exit(0)`` in a cell for success, though no later cell runs."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            raise ValueError(f"cell {number} was never executed: an earlier one left the notebook")
    for number, message in notebooks.errors(notebook):
        raise ValueError(f"cell {number}: {message}")


def _explain(error: Exception, task: Mapping[str, Any]) -> tuple[str, str]:
    """Status and one line for what stopped a lab."""
    if type(error).__name__ == "CellTimeoutError":
        return TIMEOUT, f"a cell took longer than {task['timeout_s']} s"
    if isinstance(error, OSError) and error.strerror and not error.filename:
        return FAILED, f"{error.strerror}, while {task['target']} was written"
    if type(error).__name__ == "PapermillExecutionError":
        count, name, value = (getattr(error, key) for key in ("exec_count", "ename", "evalue"))
        return FAILED, f"in [{count}]: {name}: {_first_line(value)}"
    return FAILED, _first_line(str(error)) or type(error).__name__


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
