"""Exercises on a small folder of labs made here; and every real solution passes its own cases."""

from __future__ import annotations

import contextlib
import random
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch

from labutils import exercises, folders, grading
from labutils.grading import SOLVED, UNSOLVED, WRONG, Reference, difference, grade
from tests import notebook_maker

SHARDS = '''
"""Cut a batch into one shard per rank."""
lab = "02"
hints = ["torch.chunk is near.", "The first ranks get one element more."]

def shards(batch, ranks):
    return list(batch.tensor_split(ranks))

def cases(rng):
    import torch
    for ranks in (4, 1, 2):
        yield torch.randn(rng.randint(ranks, 9)), ranks
'''
SCALE = """
lab = "01"

def scale(tensor, factor):
    tensor.mul_(factor)

def run(answer, tensor, factor):
    answer(tensor, factor)
    return tensor

def cases(rng):
    import torch
    yield torch.ones(3), 2.0
"""


@pytest.fixture(autouse=True)
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    labs = tmp_path / "clone" / "labs"
    (labs / "solutions").mkdir(parents=True)
    (labs / "solutions" / "shards.py").write_text(SHARDS)
    (labs / "solutions" / "scale.py").write_text(SCALE)
    notebook_maker.write(labs / "02_lab.ipynb")
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(exercises, "_answers", {})
    monkeypatch.setattr(exercises, "_hints_given", {})
    monkeypatch.chdir(labs)
    return labs


def answer(name: str, function: Callable[..., Any]) -> Any:
    return exercises.exercise(name)(function)


def right(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return list(torch.tensor_split(batch, ranks))


def raises_not_implemented(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    raise NotImplementedError


def blank_body(batch: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:  # type: ignore[empty-body]
    ...


def blank_inside(batch: torch.Tensor, ranks: int) -> Any:
    length = len(batch) // ...  # type: ignore[operator]
    return batch[:length]


def returns_none(batch: torch.Tensor, ranks: int) -> None:
    return None


@pytest.mark.parametrize("stub", [raises_not_implemented, blank_body, blank_inside, returns_none])
def test_a_stub_is_unsolved_and_the_reference_takes_its_place(
    stub: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    used = answer("shards", stub)
    assert "not solved yet, the cells below use the reference" in capsys.readouterr().out
    assert [len(shard) for shard in used(torch.arange(5), 2)] == [3, 2]
    verdict = exercises.check("shards")
    assert verdict.grade.status == UNSOLVED
    assert not verdict
    assert "not solved yet" in repr(verdict)
    assert "0 of 2 exercises solved" in repr(exercises.progress())


def test_an_index_or_type_with_dots_is_no_blank() -> None:
    def answers(batch: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
        kind: Callable[..., Any] = list
        return kind(batch[..., :].tensor_split(ranks))

    assert not grading.has_blanks(answers)
    assert grading.has_blanks(blank_inside)


def test_a_right_answer_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer("shards", right) is right
    assert "solved, the cells below use your answer" in capsys.readouterr().out
    verdict = exercises.check("shards")
    assert verdict
    assert repr(verdict) == "✔ shards: solved, right in all 3 cases"


def test_a_wrong_answer_shows_the_smallest_failing_case() -> None:
    def wrong(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        print("looking at", ranks)
        return list(batch.tensor_split(ranks)) if ranks == 1 else [batch]

    used = answer("shards", wrong)
    assert len(used(torch.arange(6), 3)) == 3
    verdict = exercises.check("shards")
    assert verdict.grade.status == WRONG
    shown = repr(verdict)
    assert shown == repr(exercises.check("shards"))
    assert "wrong in 2 of 3 cases" in shown
    assert "ranks = 2" in shown  # the smaller of the two that fail: 4 ranks come first
    assert "1 elements instead of 2" in shown
    assert "looking at 2" in shown
    page = verdict._repr_html_()
    assert "ranks = 2" in page
    assert "<b>expected</b>" in page
    assert "1 of 2" not in repr(exercises.progress())


def test_a_loop_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "LIMIT_S", 0.2)
    calls = []

    def endless(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        calls.append(ranks)
        while True:
            pass

    answer("shards", endless)
    assert len(calls) == 1  # not once for each case
    assert "has not come back within 0.2 s: does a loop never end?" in repr(
        exercises.check("shards")
    )


def test_a_loop_that_catches_everything_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "LIMIT_S", 0.2)

    def endless(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    answer("shards", endless)
    assert "has not come back" in repr(exercises.check("shards"))


class Unshowable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


@pytest.mark.parametrize("raised", [Unshowable(), GeneratorExit(), None])
def test_what_cannot_be_shown_is_no_accident(raised: BaseException | None) -> None:
    def strange(batch: torch.Tensor, ranks: int) -> Any:
        if raised is not None:
            raise raised
        return [Unshowable(), 1j]

    answer("shards", strange)
    shown = repr(exercises.check("shards"))
    assert "wrong in 3 of 3" in shown
    assert "cannot be shown" in shown or "GeneratorExit" in shown


def test_a_complex_number_is_another_number() -> None:
    assert difference(1j, 1.0) == "a complex instead of a float"


def test_a_line_of_the_stub_may_stay_in_an_answer() -> None:
    def whole(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        ...  # noqa: PIE790 - your code here
        return list(batch.tensor_split(ranks))

    def begun(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        size = len(batch) // ranks
        ...  # noqa: PIE790 - your code here
        return list(batch[:size])

    answer("shards", whole)
    assert exercises.check("shards").grade.status == SOLVED
    answer("shards", begun)
    assert exercises.check("shards").grade.status == UNSOLVED


def test_a_script_of_the_labs_is_found_from_elsewhere(
    labs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (labs / "scripts").mkdir()
    (labs / "scripts" / "train.py").touch()
    assert folders.find_script("scripts/train.py") == str(labs / "scripts" / "train.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no script 'scripts/train.py' in "):
        folders.find_script("scripts/train.py")
    monkeypatch.setenv("LABUTILS_LABS", str(labs))
    assert folders.find_script("scripts/train.py") == str(labs / "scripts" / "train.py")


def test_leaving_python_is_an_error_of_the_answer() -> None:
    def leaves(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        raise SystemExit("bye")

    answer("shards", leaves)
    assert "SystemExit: bye" in repr(exercises.check("shards"))


def test_none_from_an_answer_that_a_check_works_with(labs: Path) -> None:
    text = "def double(x) -> float:\n    return 2 * x\ndef cases(rng):\n    yield (1,)\n"
    run = "def run(answer, x):\n    return answer(x).is_integer()\n"
    (labs / "solutions" / "double.py").write_text(text.replace("2 * x", "2.0 * x") + run)
    answer("double", lambda x: None)
    assert "double returns None; it should return" in repr(exercises.check("double"))


def test_the_decorator_without_brackets_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match="in brackets: @lab.exercise"):
        exercises.exercise(right)  # type: ignore[arg-type]


def test_an_exception_shows_the_learners_own_line() -> None:
    def breaks(batch: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        size = len(batch) + 1
        return list(batch.view(size))  # mine

    answer("shards", breaks)
    shown = repr(exercises.check("shards"))
    line = breaks.__code__.co_firstlineno + 2
    assert f"in your line {line}: return list(batch.view(size))  # mine" in shown
    assert "RuntimeError: shape" in shown


def test_torchs_own_not_implemented_is_an_error_not_a_stub() -> None:
    def breaks(batch: torch.Tensor, ranks: int) -> Any:
        return torch.nn.Module()(batch)

    answer("shards", breaks)
    assert "NotImplementedError: Module" in repr(exercises.check("shards"))


def test_answers_that_work_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    def good(tensor: torch.Tensor, factor: float) -> None:
        tensor *= factor

    def copies(tensor: torch.Tensor, factor: float) -> None:
        tensor = tensor * factor

    assert answer("scale", good) is good
    answer("scale", copies)
    verdict = exercises.check("scale")
    assert verdict.grade.status == WRONG
    # The input is shown as it was given, not as the answer left it.
    assert "tensor = tensor([1., 1., 1.])" in repr(verdict)
    assert "3 of 3 elements differ" in repr(verdict)


def test_a_class_can_be_the_answer() -> None:
    class Doubler(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    class Stub(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor: ...  # type: ignore[empty-body]

    def cases(rng: random.Random) -> Iterator[tuple[torch.Tensor]]:
        yield (torch.randn(rng.randint(1, 4)),)

    reference = Reference("Doubler", Doubler, cases, run=lambda answer, x: answer()(x))
    assert grade(Doubler, reference).status == SOLVED
    assert grade(Stub, reference).status == UNSOLVED
    assert grade(torch.nn.Identity, reference).status == WRONG


def test_random_numbers_of_the_notebook_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    answer("shards", right)
    exercises.check("shards")
    assert torch.equal(torch.rand(3), expected)


def test_a_comparison_of_the_exercises_own() -> None:
    def cases(rng: random.Random) -> Iterator[tuple[int]]:
        yield (3,)

    def compare(yours: int, expected: int) -> str | None:
        return None if yours % 10 == expected % 10 else "another last digit"

    reference = Reference("last", lambda n: n + 10, cases, compare=compare)
    assert grade(lambda n: n, reference).status == SOLVED
    assert grade(lambda n: n + 1, reference).smallest.reason == "another last digit"


def test_hints_come_one_by_one() -> None:
    assert "2." not in repr(exercises.hint("shards"))
    second = repr(exercises.hint("shards"))
    assert "1.  torch.chunk" in second
    assert "2.  The first ranks" in second
    assert "lab.solution('shards')" in second
    assert repr(exercises.hint("shards")) == second
    assert "lab.solution" in repr(exercises.hint("scale"))  # which has none


def test_the_solution_is_shown() -> None:
    shown = repr(exercises.solution("shards"))
    assert "return list(batch.tensor_split(ranks))" in shown
    assert "hints" not in shown


def test_progress_stays_once_solved(tmp_path: Path) -> None:
    answer("shards", right)
    answer("shards", lambda batch, ranks: 0)
    assert repr(exercises.progress()) == (
        "1 of 2 exercises solved\n  scale   open\n  shards  solved"  # in order of labs, 01 first
    )


def test_progress_that_cannot_be_kept_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path / "file"))
    assert answer("shards", right) is right
    assert "Progress was not kept" in capsys.readouterr().out
    assert "0 of 2" in repr(exercises.progress())


def test_bad_names() -> None:
    with pytest.raises(ValueError, match=r"no exercise 'shard'; the nearest are shards\.$"):
        exercises.exercise("shard")
    with pytest.raises(ValueError, match=r"no exercise 'xyz'; the nearest are (\w+, )?\w+\.$"):
        exercises.hint("xyz")
    for call in (exercises.check, exercises.hint, exercises.solution, exercises.exercise):
        for name in (None, 3, ["shards"]):
            with pytest.raises(TypeError, match="An exercise is named by a text such as 'ring_"):
                call(name)  # type: ignore[operator]
    with pytest.raises(ValueError, match="Run the cell with @lab.exercise"):
        exercises.check("shards")


def test_solutions_are_found_from_anywhere_in_the_clone(
    labs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in (labs, labs.parent, labs / "solutions"):
        monkeypatch.chdir(place)
        assert folders.solutions_folder() == labs / "solutions"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABUTILS_LABS", str(labs))
    assert folders.solutions_folder() == labs / "solutions"
    monkeypatch.setenv("LABUTILS_LABS", str(tmp_path))
    with pytest.raises(ValueError, match="LABUTILS_LABS"):
        folders.solutions_folder()


def test_the_reference_travels_to_a_process_that_has_no_labs(labs: Path) -> None:
    import subprocess
    import sys

    import cloudpickle

    used = answer("shards", raises_not_implemented)
    code = (
        "import pickle, sys, torch; f = pickle.load(sys.stdin.buffer);"
        "print([len(s) for s in f(torch.arange(5), 2)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=cloudpickle.dumps(used), capture_output=True, cwd="/"
    )
    assert done.stdout.decode().strip() == "[3, 2]", done.stderr.decode()


@pytest.mark.parametrize(
    ("yours", "expected", "reason"),
    [
        (torch.ones(2), torch.ones(2) + 1e-6, None),
        (torch.ones(2), torch.tensor([1.0, 1.1]), "1 of 2 elements differ"),
        (torch.ones(3), torch.ones(3, 1), "shape (3,) instead of (3, 1)"),
        (torch.ones(3), torch.ones(3, dtype=torch.int64), "dtype torch.float32 instead of"),
        (torch.ones(1), torch.ones(1, device="meta"), "device cpu instead of meta"),
        (torch.tensor([2]), torch.tensor([3]), "1 of 1 elements differ"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), None),
        (1.0, torch.tensor(1.0), "a float instead of a Tensor"),
        ([1, (2, 3)], (1, [2, 3]), None),
        ([1, [2, 4]], [1, [2, 3]], "[1][1]: another value"),
        ([1], [1, 2], "1 elements instead of 2"),
        ({"a": 1}, {"b": 1}, "keys"),
        ({"a": [torch.ones(1)]}, {"a": [torch.zeros(1)]}, "['a'][0]: 1 of 1 elements differ"),
        (0.1 + 0.2, 0.3, None),
        (0.4, 0.3, "another number"),
        (1, 1.0, None),
        (True, 1, "a bool instead of an int"),
        ("a", "b", "another value"),
    ],
)
def test_difference(yours: Any, expected: Any, reason: str | None) -> None:
    found = difference(yours, expected)
    assert found is None if reason is None else found is not None and reason in found


def test_in_a_notebook(labs: Path) -> None:
    stub = """
    from labutils import exercises as lab
    @lab.exercise("shards")
    def shards(batch, ranks):
        size = len(batch) // ranks
        raise NotImplementedError
    """
    broken = """
    @lab.exercise("shards")
    def shards(batch, ranks):
        size = len(batch) // ranks
        return batch.view(ranks, sizes)
    """
    use = "import torch\n[len(s) for s in shards(torch.arange(7), 3)]"
    cells = [
        textwrap.dedent(stub).strip(),
        use,
        textwrap.dedent(broken).strip(),
        "lab.check('shards')",
        use,
    ]
    path = notebook_maker.write(labs / "02_lab.ipynb", *cells)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(labs)}}).execute()
    outputs = [str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert "not solved yet" in outputs[0]
    assert "[3, 2, 2]" in outputs[1]
    assert "not right yet" in outputs[2]
    assert "in your line 4: return batch.view(ranks, sizes)" in outputs[3]
    assert "NameError" in outputs[3]
    assert "text/html" in outputs[3]
    assert "[3, 2, 2]" in outputs[4]


REAL = Path(__file__).resolve().parents[1] / "labs"


@pytest.mark.parametrize("name", sorted(p.stem for p in (REAL / "solutions").glob("[!_]*.py")))
def test_every_solution_of_the_labs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABUTILS_LABS", str(REAL))
    reference = exercises._load(name)
    found = grade(reference.function, reference)
    assert (found.status, found.failures) == (SOLVED, [])
    assert found.cases >= 3
    assert reference.hints
    assert reference.lab
    assert name in repr(exercises.solution(name))
