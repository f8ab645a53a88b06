"""The lab on DDP: its solutions beside PyTorch's own, and its two halves apart."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

import labutils as lab
from labutils import exercises
from tests import ddp_ranks
from tests.ddp_ranks import batch, flat, network
from tests.wrong_answers import ddp

NOTEBOOK = Path(__file__).resolve().parents[1] / "labs" / "04_ddp_single_node.ipynb"


def solution(name: str) -> Any:
    return exercises._load(name).function


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_those_of_one_process_and_of_torch(ranks: int) -> None:
    names = ("average_gradients", "reduce_when_ready", "bucket_groups", "reduce_in_buckets")
    run = lab.launch(ddp_ranks.four_ways, ranks, args=tuple(map(solution, names)))
    buckets, *ways = run.results[0]
    naive, overlapped, bucketed, theirs = ways
    assert buckets > 1  # otherwise all agree anyway
    for way in ways:
        for step, gradient in enumerate(way):
            module = network()
            parts = [batch(rank, step) for rank in range(ranks)]
            x, y = (torch.cat(pieces) for pieces in zip(*parts))
            F.cross_entropy(module(x), y).backward()
            torch.testing.assert_close(gradient, flat(module), rtol=1e-5, atol=1e-7)
    # From the second pass on DDP's buckets are in the order of arrival, and so are the lab's.
    assert all(torch.equal(a, b) for a, b in zip(bucketed[1:], theirs[1:]))
    if ranks == 2:  # a + b is b + a: no order to speak of
        assert all(torch.equal(a, b) for a, b in zip(naive + overlapped, theirs + theirs))


def test_a_small_resnet_agrees_to_rounding() -> None:
    for off in lab.launch(ddp_ranks.small_resnet, 3, args=(solution("reduce_in_buckets"),)).results:
        assert max(off) < 1e-6


def test_buckets_are_those_of_torch() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        sizes = torch.randint(1, 40, (12,)).tolist()
        tensors = [torch.empty(size) for size in sizes]
        limit = 4 * int(torch.randint(1, 90, ()))
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [limit])
        assert solution("bucket_groups")([4 * size for size in sizes], limit) == theirs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 7, 8, 24])
def test_indices_are_those_of_the_sampler(ranks: int, length: int) -> None:
    for rank in range(ranks):
        sampler = DistributedSampler(range(length), ranks, rank, shuffle=False)  # type: ignore[arg-type]
        assert solution("sampler_indices")(length, ranks, rank) == list(sampler)


def test_learning_rate_is_that_of_goyal() -> None:
    """From 0.1 to 3.2 in five epochs of 156 steps (section 2.2 and 5.1), 8,192 images a step."""
    rate = [solution("learning_rate")(step, 5 * 156, 0.1, 32) for step in (0, 390, 780, 5000)]
    assert rate == pytest.approx([0.1, 1.65, 3.2, 3.2])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_accuracy_is_exact_for_any_number_of_ranks(ranks: int) -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(37, 3), torch.randint(0, 3, (37,))
    arguments = (nn.Identity(), scores, labels)
    run = lab.launch(solution("exact_accuracy"), ranks, args=arguments)
    assert run.results == [(scores.argmax(1) == labels).float().mean().item()] * ranks


def test_accumulated_gradient_is_that_of_all_batches_in_one() -> None:
    run = lab.launch(ddp_ranks.accumulated, 2, args=(solution("accumulate_gradients"),))
    module = network()
    parts = [batch(rank, step) for rank in range(2) for step in range(3)]
    x, y = (torch.cat(pieces) for pieces in zip(*parts))
    F.cross_entropy(module(x), y).backward()
    for gradient in run.results:
        torch.testing.assert_close(gradient, flat(module), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("average_gradients", ddp_ranks.one_flat_message),
        ("average_gradients", ddp_ranks.gathered_and_averaged),
        ("sampler_indices", ddp_ranks.indices_as_tensor),
        ("reduce_when_ready", ddp_ranks.divided_afterwards),
        ("reduce_in_buckets", ddp_ranks.copied_back),
    ],
)
def test_another_right_answer_is_accepted(
    name: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    lab.exercise(name)(answer)
    assert lab.check(name), lab.check(name)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("average_gradients", ddp.summed, "2 times the average: divide by the number of ranks"),
        ("average_gradients", ddp.divided_only, "the ranks hold different gradients"),
        ("reduce_when_ready", ddp.reduced_one_after_the_other, "an all-reduce is not asynchronous"),
        ("reduce_in_buckets", ddp.one_bucket_for_all, "but 1 all-reduce in pass 1 instead of 2"),
        ("accumulate_gradients", ddp.not_divided, "3 times the average: divide by 3"),
    ],
)
def test_a_wrong_answer_is_told_in_a_sentence(
    name: str,
    wrong: Callable[..., Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("LABUTILS_DATA", str(tmp_path))
    lab.exercise(name)(wrong)
    verdict = lab.check(name)
    assert told in repr(verdict)
    assert "tensor(" not in repr(verdict)  # no screens of floats


def test_sync_batch_norm_is_one_big_batch_in_every_launch() -> None:
    expected = nn.BatchNorm1d(3)(torch.arange(24.0).view(8, 3).sin()).detach()
    for _ in range(2):  # ranks of a second launch have more loaded, which once made a difference
        outputs = lab.launch(ddp_ranks.synchronised_norm, 2).results
        torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-5)


def cells() -> Iterator[tuple[bool, str]]:
    """(belongs to part two, source) of each code cell; magics taken out."""
    second = False
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        second = second or cell.source.startswith("# Part two")
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
            yield second, "\n".join(lines)


def unknown(sources: list[str], known: set[str]) -> set[str]:
    """Names that the cells use without anything before having made them, wherever they stand."""
    used: set[str] = set()
    made = set(known)
    for source in sources:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                made.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                made.add(node.name)
    return used - made


def test_part_two_stands_on_its_own() -> None:
    known = {*dir(builtins), "gpus", "profile"}
    assert unknown([source for second, source in cells() if second], known) == set()
    assert unknown([source for second, source in cells() if not second], known) == set()


def test_a_name_from_part_one_would_be_noticed() -> None:
    second = [source for second, source in cells() if second]
    assert unknown([*second, "print(flat(model))"], {*dir(builtins), "gpus", "profile"}) == {"flat"}
