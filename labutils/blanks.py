"""What is still to be filled in of an answer: the ``...`` of its stub."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any


def has_blanks(answer: Callable[..., Any], beside_others: bool = True) -> bool:
    """Does the code still hold a ``...`` to fill in?  (Those of an index or a type are none.)

    Args:
        beside_others: also count a line of nothing but ``...`` that has other lines beside it.
    """
    return any(_blanks(function, beside_others) for function in functions(answer))


def functions(answer: Callable[..., Any]) -> list[FunctionType]:
    """The function itself, or the methods of a class."""
    parts = [answer, *getattr(answer, "__dict__", {}).values()]
    return [part for part in parts if isinstance(part, FunctionType)]


def _blanks(function: FunctionType, beside_others: bool) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source: typed at a prompt, or exec'd
        return False
    return _holds_blank(tree if beside_others else _Alone().visit(tree))


def _holds_blank(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return _holds_blank(node.value)
    if isinstance(node, ast.Constant):
        return node.value is ...
    return any(map(_holds_blank, ast.iter_child_nodes(node)))


class _Alone(ast.NodeTransformer):
    """Takes the lines of nothing but ``...`` out of a function's body that has other lines."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        rest = [line for line in node.body if not _is_blank_line(line)]
        told = [line for line in rest if not _is_text(line)]
        node.body = rest if told else node.body
        return node


def _is_blank_line(line: ast.stmt) -> bool:
    return _is_text(line, of=type(...))


def _is_text(line: ast.stmt, of: type = str) -> bool:
    """Is it nothing but a constant: a docstring, or a ``...``?"""
    alone = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return alone and isinstance(line.value.value, of)  # type: ignore[attr-defined]
