"""What is known of a failure, as plain data that travels from the rank to the notebook."""

from __future__ import annotations

import re
import traceback
from typing import Any

SECONDARY = re.compile(
    r"connection (closed|reset)|broken pipe|socket (closed|timeout)|timed? ?out|"
    r"remote process exited|connection was (closed|refused)|connection refused|"
    r"recvvalue failed|sendbytes failed|failed to recv|store.*(gone|closed)|wait timeout",
    re.IGNORECASE,
)
"""Messages of errors that usually follow from another rank's failure."""


def describe_exception(error: BaseException, depth: int = 4) -> dict[str, Any]:
    """Type, message and frames of an exception and of what caused it."""
    summary = traceback.TracebackException.from_exception(error)
    frames = [(f.filename, f.lineno or 0, f.name, f.line or "") for f in summary.stack]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "type": type(error).__name__,
        "message": _message(error),
        "frames": frames[-60:],
        "notes": [str(note) for note in getattr(error, "__notes__", ())],
        "cause": describe_exception(cause, depth - 1) if cause is not None and depth else None,
        "secondary": is_secondary(error),
        "syntax": "".join(summary.format_exception_only())
        if isinstance(error, SyntaxError)
        else "",
    }


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the code ended itself with exit code {error.code!r}"
    try:
        return str(error)
    except Exception:
        return "<the exception cannot be shown>"


def is_secondary(error: BaseException) -> bool:
    """Whether the error usually means that *another* rank has failed."""
    if getattr(error, "secondary", False):
        return True
    network = isinstance(error, RuntimeError | ConnectionError | TimeoutError)
    return network and bool(SECONDARY.search(str(error)))
