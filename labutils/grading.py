"""Is a learner's answer an answer, and is it right?  Plain results; ``exercises`` shows them.

Random inputs come from a fixed seed, so the verdict is the same every time: what a notebook stores
can be compared, and a learner who fixes a case does not meet another one instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import linecache
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from numbers import Real
from typing import Any

import torch

from labutils.alarm import TooSlow, limit
from labutils.answer_types import as_announced
from labutils.blanks import functions, has_blanks

SOLVED, UNSOLVED, WRONG = "solved", "unsolved", "wrong"
LIMIT_S = 30.0
"""How long an answer may take for one case."""
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Tolerances for floats: sums in another order differ by less, a wrong formula by more."""

Case = tuple[Any, ...]


@dataclass(frozen=True)
class Reference:
    """A solved exercise: what an answer is held against."""

    name: str
    function: Callable[..., Any]
    cases: Callable[[random.Random], Iterable[Case]]
    """Yields tuples of arguments.  Torch's own generator is seeded too, for ``torch.randn``."""
    hints: Sequence[str] = ()
    compare: Callable[[Any, Any], str | None] | None = None
    """(yours, expected) -> what differs, in a few words, or None; see :func:`difference`."""
    run: Callable[..., Any] | None = None
    """(answer, *case) -> what is compared, where that is not simply ``answer(*case)``: a class to
    build and use, a function that works in place."""
    lab: str = ""


@dataclass(frozen=True)
class Failure:
    """One case in which the answer is not the expected one."""

    case: Case
    expected: Any
    yours: Any = None
    reason: str = ""
    error: str = ""
    """The exception and the learner's line; then there is no ``yours``."""
    printed: str = ""
    raised: BaseException | None = None


@dataclass(frozen=True)
class Grade:
    """The verdict on one answer."""

    status: str
    """``solved``, ``unsolved`` or ``wrong``."""
    cases: int = 0
    failures: list[Failure] = field(default_factory=list)
    reason: str = ""
    """Why it counts as unsolved."""

    @property
    def smallest(self) -> Failure:
        """The failing case with the least to look at."""
        return min(self.failures, key=lambda failure: size(failure.case))


class _Unsolved(Exception):
    """The answer is still a stub; the message says how that shows."""


def grade(answer: Callable[..., Any], reference: Reference, seed: int = 0) -> Grade:
    """Hold an answer against the reference on every case."""
    blank = Grade(UNSOLVED, reason="there is still a ... to fill in")
    blanks = has_blanks(answer)
    if blanks and has_blanks(answer, beside_others=False):
        return blank  # else the rest may be all that is needed, and a line of the stub was left
    failures = []
    # Each run has inputs of its own: an answer that changes them in place spoils nothing.
    mine, theirs, shown = (_inputs(reference, seed) for _ in range(3))
    try:
        for number, case, again, clean in zip(count(), mine, theirs, shown):
            expected = _seeded(number, reference.function, reference, again)
            failure = _examine(answer, reference, number, case, clean, expected)
            failures += [failure] if failure else []
            if failure and isinstance(failure.raised, TooSlow):
                break  # the other cases would take as long
    except _Unsolved as stub:
        return Grade(UNSOLVED, reason=str(stub))
    if failures and blanks:
        return blank
    return Grade(WRONG if failures else SOLVED, len(mine), failures)


def difference(yours: Any, expected: Any, where: str = "") -> str | None:
    """What differs between two results, in a few words; None if they agree.

    Tensors agree in device, shape, type and (floats: nearly) values; a list may stand for a tuple.
    """
    at = f"{where}: " if where else ""
    if isinstance(expected, torch.Tensor) and isinstance(yours, torch.Tensor):
        found = _tensor_difference(yours, expected)
        return f"{at}{found}" if found else None
    if _is_sequence(expected) and _is_sequence(yours):
        if len(yours) != len(expected):
            return f"{at}{len(yours)} elements instead of {len(expected)}"
        pairs: Iterator[tuple[Any, Any, Any]] = zip(count(), yours, expected)
        return _first_difference(pairs, where)
    if isinstance(expected, Mapping) and isinstance(yours, Mapping):
        if set(yours) != set(expected):
            return f"{at}keys {sorted(map(repr, yours))} instead of {sorted(map(repr, expected))}"
        return _first_difference(((k, yours[k], expected[k]) for k in expected), where)
    if isinstance(yours, torch.Tensor) and yours.dim() == 0 and _is_number(expected):
        yours = yours.item()
    if type(yours) is not type(expected) and not (_is_number(yours) and _is_number(expected)):
        return f"{at}{_kind(yours)} instead of {_kind(expected)}"
    if isinstance(expected, float):
        same = math.isclose(yours, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return None if same or (yours != yours and expected != expected) else f"{at}another number"
    return None if yours == expected else f"{at}another value"


def size(value: Any) -> int:
    """How much there is to look at, for choosing the smallest case."""
    if isinstance(value, torch.Tensor):
        return 1 + value.numel()
    if isinstance(value, torch.nn.Module):
        return 1 + sum(p.numel() for p in value.parameters())
    if isinstance(value, Mapping):
        return 1 + sum(map(size, value.values()))
    if _is_sequence(value):
        return 1 + sum(map(size, value))
    return 1 + min(abs(value), 1 << 20) if isinstance(value, int) else 1


def _inputs(reference: Reference, seed: int) -> list[Case]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return list(reference.cases(random.Random(seed)))


def _seeded(number: int, answer: Callable[..., Any], reference: Reference, case: Case) -> Any:
    """Run an answer on a case, with the same random numbers for everybody."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        return reference.run(answer, *case) if reference.run else answer(*case)


def _returning(answer: Callable[..., Any], reference: Reference) -> Callable[..., Any]:
    """The answer as the cells below get it; it says so where it returns None and should not."""
    name, returns = reference.name, str(_annotation(reference.function))
    answer = as_announced(answer, reference.function)
    if reference.run is None or isinstance(answer, type) or "None" in returns:
        return answer

    @functools.wraps(answer)
    def returning(*args: Any, **kwargs: Any) -> Any:
        result = answer(*args, **kwargs)
        if result is None:
            raise TypeError(f"{name} returns None; it should return {returns}")
        return result

    return returning


def _annotation(function: Callable[..., Any]) -> Any:
    returns = inspect.signature(function).return_annotation
    return None if returns is inspect.Signature.empty else returns


def _examine(
    answer: Callable[..., Any],
    reference: Reference,
    number: int,
    case: Case,
    shown: Case,
    expected: Any,
) -> Failure | None:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), limit(LIMIT_S):
            yours = _seeded(number, _returning(answer, reference), reference, case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever an answer does, the notebook goes on
        lines = _own_lines(error, answer)
        if isinstance(error, NotImplementedError) and lines and lines[-1][0]:
            raise _Unsolved("it raises NotImplementedError") from None
        said = _describe(error, lines)
        return Failure(shown, expected, error=said, printed=printed.getvalue(), raised=error)
    if (yours is None and expected is not None) or yours is ...:
        raise _Unsolved(f"it returns {'None' if yours is None else '...'}")
    reason = (reference.compare or difference)(yours, expected)
    if reason is None:
        return None
    assert isinstance(reason, str), f"compare of {reference.name} must return a sentence or None"
    return Failure(shown, expected, yours, reason, printed=printed.getvalue())


def _own_lines(error: BaseException, answer: Callable[..., Any]) -> list[tuple[bool, int, str]]:
    """The frames of a traceback as (is it the learner's code?, line number, text)."""
    files = {function.__code__.co_filename for function in functions(answer)}
    lines, step = [], error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        text = linecache.getline(file, step.tb_lineno, step.tb_frame.f_globals).strip()
        lines.append((file in files, step.tb_lineno, text))
        step = step.tb_next
    return lines


def _describe(error: BaseException, lines: Sequence[tuple[bool, int, str]]) -> str:
    try:
        what = f"{type(error).__name__}: {error}"
    except Exception:
        what = f"{type(error).__name__}, which cannot be shown"
    own = [(number, text) for is_own, number, text in lines if is_own]
    if not own:
        return what
    number, text = own[-1]
    return f"{what}\nin your line {number}" + (f": {text}" if text else "")


def _tensor_difference(yours: torch.Tensor, expected: torch.Tensor) -> str | None:
    for name in ("device", "shape", "dtype"):
        mine, theirs = getattr(yours, name), getattr(expected, name)
        if mine != theirs:
            if name == "shape":
                mine, theirs = tuple(mine), tuple(theirs)
            return f"{name} {mine} instead of {theirs}"
    a, b = yours.detach().cpu(), expected.detach().cpu()
    if not (a.is_floating_point() or a.is_complex()):
        wrong = a != b
    else:
        wrong = ~torch.isclose(a, b, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ" if wrong.any() else None


def _first_difference(pairs: Iterable[tuple[Any, Any, Any]], where: str) -> str | None:
    found = (difference(y, e, f"{where}[{key!r}]") for key, y, e in pairs)
    return next((reason for reason in found if reason), None)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0].lower() in 'aeiou')} {name}"
