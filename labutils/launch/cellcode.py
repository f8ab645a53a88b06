"""Running a cell's text in a namespace; the value of its last expression as notebooks show it."""

from __future__ import annotations

import ast
import linecache
import pprint
from typing import Any


def compile_cell(source: str, filename: str) -> tuple[Any, Any]:
    """Code for the statements, and for the last expression (None if there is none to show)."""
    tree = ast.parse(source, filename)
    shown = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = tree.body.pop()
        assert isinstance(last, ast.Expr)
        shown = compile(ast.Expression(last.value), filename, "eval")
    return compile(tree, filename, "exec"), shown


def remember(source: str, filename: str) -> None:
    """Let tracebacks and ``inspect`` find the cell's lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def run(source: str, filename: str, namespace: dict[str, Any]) -> str | None:
    """Run the cell; returns the text of its last expression's value, None if there is none."""
    remember(source, filename)
    statements, shown = compile_cell(source, filename)
    exec(statements, namespace)
    value = None if shown is None else eval(shown, namespace)
    if value is None:
        return None
    namespace["_"] = value
    return pprint.pformat(value, width=100, sort_dicts=False) if _is_plain(value) else repr(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | set)
