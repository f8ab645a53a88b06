"""A right answer of another type: accepted, and the cells below get the type that they expect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy
import pytest
import torch

from labutils import exercises
from labutils.answer_types import converted
from labutils.grading import _inputs, _seeded


@pytest.mark.parametrize(
    ("value", "announced", "expected"),
    [
        (numpy.ceil(2.5), int, 3),
        (torch.tensor(3), int, 3),
        (2.5, int, 2.5),  # not the same number: it stays, and the check finds it
        (float("inf"), int, float("inf")),
        (True, int, True),
        (torch.tensor(0.5), float, 0.5),
        (1, float, 1.0),
        ("1", float, "1"),
        ([1], float, [1]),
        (torch.ones(1), float, torch.ones(1)),
        ((1.0, 2.0), list[int], [1, 2]),
        (range(3), list[int], [0, 1, 2]),
        (torch.arange(3), list[int], [0, 1, 2]),
        (torch.ones(2, 1), list[list[int]], [[1], [1]]),
        (numpy.array([1.0, 0.5]), tuple[float, float], (1.0, 0.5)),
        ([1, 2, 3], tuple[int, int], [1, 2, 3]),  # one too many
        ({"loss": torch.tensor(0.5)}, dict[str, float], {"loss": 0.5}),
        ([2, 1], torch.Tensor, torch.tensor([2, 1])),
        (numpy.array([2, 1]), torch.Tensor, torch.tensor([2, 1])),
        ([torch.tensor(2)], torch.Tensor, torch.tensor([2])),
        ([0.5], torch.Tensor, [0.5]),  # a loss without its graph is no loss
        ([], torch.Tensor, []),
        ((1.0,), list, (1.0,)),  # announces no parts
        ((1.0, 2.0), tuple[int, ...], (1, 2)),
        (torch.tensor(2.0), int | str, torch.tensor(2.0)),  # announces too much
        (None, float | None, None),
        (torch.tensor(2.0), float | None, 2.0),
    ],
)
def test_converted(value: Any, announced: Any, expected: Any) -> None:
    made = converted(value, announced)
    assert types(made) == types(expected)
    assert torch.equal(made, expected) if isinstance(made, torch.Tensor) else made == expected


def as_tensors_and_tuples(value: Any) -> Any:
    """Numbers become tensors, lists tuples, and tuples or rows of whole numbers lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.dim() == 1 and value.dtype is torch.int64 else value
    if isinstance(value, dict):
        return {key: as_tensors_and_tuples(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, tuple) else tuple)(map(as_tensors_and_tuples, value))
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, int | float) else value


def as_floats_and_arrays(value: Any) -> Any:
    """Numbers become numpy's floats, and lists of them arrays."""
    if isinstance(value, dict):
        return {key: as_floats_and_arrays(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [as_floats_and_arrays(part) for part in value]
        return numpy.array(parts) if all(isinstance(p, numpy.float64) for p in parts) else parts
    return numpy.float64(value) if isinstance(value, int | float) else value


def types(value: Any) -> Any:
    """The types of a result and of all that is in it."""
    if isinstance(value, dict):
        return {key: types(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types(part) for part in value]
    return type(value)


def announces_numbers(name: str) -> bool:
    announced = str(get_type_hints(exercises._load(name).function).get("return"))
    return any(word in announced for word in ("int", "float", "tuple"))


@pytest.mark.parametrize("name", [*filter(announces_numbers, exercises.names())])
@pytest.mark.parametrize(
    "other",
    [as_tensors_and_tuples, pytest.param(as_floats_and_arrays, marks=pytest.mark.full)],
)
def test_right_values_of_another_type_are_accepted_and_handed_on_as_the_references(
    name: str, other: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    reference = exercises._load(name)

    def answer(*args: Any) -> Any:
        return other(reference.function(*args))

    used = exercises.exercise(name)(answer)
    assert used is not reference.function  # so it is taken for solved
    theirs, mine = (_inputs(reference, 0)[0] for _ in range(2))
    expected = _seeded(0, reference.function, reference, theirs)
    assert types(_seeded(0, used, reference, mine)) == types(expected)
