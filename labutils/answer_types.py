"""What a right answer returns, in the type that the exercise announces.

An answer is right by its values: ``math.ceil`` or ``numpy.ceil``, a list or a tensor of lengths.
The cells below index with it, round it or print it, so they get the type of the reference's
annotation, which is also that of the stub in the notebook.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import repeat
from numbers import Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

Answer = TypeVar("Answer", bound=Callable[..., Any])


def as_announced(answer: Answer, reference: Callable[..., Any]) -> Answer:
    """The answer, whose results come in the type of the reference's annotation.

    A result that cannot be that type without another value stays as it is.  Where the reference
    announces none of the types below, this is the answer itself.
    """
    try:
        announced = get_type_hints(reference).get("return")
    except NameError:  # a name that only type checkers see
        return answer
    if _converter(announced) is None or isinstance(answer, type):
        return answer

    @functools.wraps(answer)
    def converting(*args: Any, **kwargs: Any) -> Any:
        return converted(answer(*args, **kwargs), announced)

    return converting  # type: ignore[return-value]


def converted(value: Any, announced: Any) -> Any:
    """The value as the announced type, parts included, where it is the same value."""
    convert = _converter(announced)
    return convert(value, announced) if convert else value


def _converter(announced: Any) -> Callable[[Any, Any], Any] | None:
    if announced in (list, tuple, dict):
        return None  # without its parts it announces too little
    return _CONVERTERS.get(get_origin(announced) or announced)


def _number(value: Any, announced: type) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of torch or numpy
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    return announced(value) if announced is float or value % 1 == 0 else value


def _sequence(value: Any, announced: Any) -> Any:
    if getattr(value, "shape", ()) != ():
        value = list(value)
    kind, parts = get_origin(announced), get_args(announced)
    fixed = kind is tuple and Ellipsis not in parts
    if not isinstance(value, list | tuple | range) or (fixed and len(parts) != len(value)):
        return value
    each = parts if fixed else repeat(parts[0])
    return kind(map(converted, value, each))


def _mapping(value: Any, announced: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    _, kind = get_args(announced)
    return {key: converted(part, kind) for key, part in value.items()}


def _tensor(value: Any, announced: Any) -> Any:
    """Whole numbers only: they may well be a list or an array where a tensor is announced."""
    numbers = converted(value, list[int])
    whole = isinstance(numbers, list) and numbers and all(type(n) is int for n in numbers)
    return torch.tensor(numbers) if whole and not isinstance(value, torch.Tensor) else value


def _optional(value: Any, announced: Any) -> Any:
    kinds = [kind for kind in get_args(announced) if kind is not NoneType]
    return value if value is None or len(kinds) > 1 else converted(value, kinds[0])


_CONVERTERS: dict[Any, Callable[[Any, Any], Any]] = {
    int: _number,
    float: _number,
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    torch.Tensor: _tensor,
    Union: _optional,
    UnionType: _optional,
}
"""By the announced type, without its parts."""
