"""BERT, GPT-2 and Transformer-XL compute what their papers say, and train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils import models
from labutils.models.language import BertForQuestions, Gpt2
from labutils.models.tasks import NextToken, NextTokenWithMemory, Questions
from labutils.models.transformer_xl import AdaptiveSoftmax, TransformerXL, shift

pytestmark = pytest.mark.usefixtures("one_thread")


def train(model: nn.Module, inputs: tuple, targets: Tensor, loss, steps: int, lr: float) -> float:
    """Train on one batch; returns the last loss as a fraction of the first."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(*inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses[-1] / losses[0]


def tiny_transformer_xl(layers: int = 2, room: tuple | None = None) -> TransformerXL:
    return TransformerXL(
        layers, 32, 4, 64, dropout=0.0, vocabulary=60, cutoffs=(20, 40, 50), room=room
    )


MEMORY_TASK = NextTokenWithMemory(
    layers=2, hidden=32, edges=(20, 40, 50, 60), shares=(0.2, 0.1, 0.1)
)


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (lambda: BertForQuestions(2, 32, 4, vocabulary=50), Questions(vocabulary=50)),
        (lambda: Gpt2(2, 32, 4, vocabulary=50), NextToken(vocabulary=50)),
        (lambda: tiny_transformer_xl(room=(0.2, 0.1, 0.1)), MEMORY_TASK),
    ],
    ids=["bert", "gpt2", "transformer_xl"],
)
def test_small_language_models_learn_a_batch(model, task) -> None:
    torch.manual_seed(0)
    inputs, targets = task.batch(4, 12, "cpu")
    assert train(model(), inputs, targets, task.loss, steps=60, lr=0.01) < 0.7


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_fused_attention_gives_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    plain: nn.Module
    fused: nn.Module
    if name == "gpt2":
        plain, fused = (Gpt2(2, 32, 4, vocabulary=50, fused=flag).eval() for flag in (False, True))
        inputs: tuple[Tensor, ...] = NextToken(vocabulary=50).batch(2, 9, "cpu")[0]
    else:
        plain, fused = (
            BertForQuestions(2, 32, 4, vocabulary=50, fused=flag).eval() for flag in (False, True)
        )
        inputs = Questions(vocabulary=50).batch(2, 9, "cpu")[0]
        inputs[2][:, 6:] = False
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(*inputs), fused(*inputs))


def test_gpt2_does_not_look_ahead() -> None:
    model = Gpt2(2, 32, 4, vocabulary=50).eval()
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 40
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_bert_does_not_see_padding() -> None:
    model = BertForQuestions(2, 32, 4, vocabulary=50).eval()
    (tokens, segments, mask), _ = Questions(vocabulary=50).batch(2, 10, "cpu")
    mask[:, 7:] = False
    changed = tokens.clone()
    changed[:, 7:] = 0
    before, after = model(tokens, segments, mask), model(changed, segments, mask)
    torch.testing.assert_close(before[:, :7], after[:, :7])


def test_shift_moves_every_score_to_its_key() -> None:
    queries, memory = 4, 3
    keys = queries + memory
    distance = torch.arange(keys - 1, -1, -1.0).expand(1, 1, queries, keys)
    shifted = shift(distance)[0, 0]
    for query in range(queries):
        for key in range(memory + query + 1):
            assert shifted[query, key] == memory + query - key


def test_adaptive_softmax_is_a_distribution() -> None:
    torch.manual_seed(0)
    softmax = AdaptiveSoftmax(8, 30, (10, 15, 25), room=None)
    for parameter in softmax.parameters():
        nn.init.normal_(parameter)
    every_word = torch.arange(30)
    hidden = torch.randn(1, 8).expand(30, 8)
    probabilities = (-softmax(hidden, every_word, torch.randn(30, 8))).exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-5)


def test_adaptive_softmax_with_room_for_its_words_is_exact() -> None:
    torch.manual_seed(0)
    exact = AdaptiveSoftmax(8, 30, (10, 15, 25), room=None)
    roomy = AdaptiveSoftmax(8, 30, (10, 15, 25), room=(0.25, 0.25, 0.25))
    words, hidden = torch.randn(30, 8), torch.randn(8, 8)
    nn.init.normal_(exact.clusters)
    roomy.load_state_dict(exact.state_dict())
    targets = torch.tensor([3, 12, 26, 9, 14, 20, 0, 29])
    torch.testing.assert_close(exact(hidden, targets, words), roomy(hidden, targets, words))
    crowded = torch.full((8,), 12)
    short = exact(hidden, crowded, words) - roomy(hidden, crowded, words)
    assert (short > 0).sum().item() == 8 - 2  # two find room


def test_transformer_xl_memory_continues_the_text() -> None:
    torch.manual_seed(0)
    model = tiny_transformer_xl(layers=1).eval()
    nn.init.normal_(model.u)
    nn.init.normal_(model.v)
    text, targets = torch.randint(60, (2, 12)), torch.randint(60, (2, 12))
    whole, _ = model(text, targets, torch.zeros(2, 1, 0, 32))
    _, memory = model(text[:, :6], targets[:, :6], torch.zeros(2, 1, 6, 32))
    continued, newest = model(text[:, 6:], targets[:, 6:], memory)
    torch.testing.assert_close(continued, whole[:, 6:])
    assert newest.shape == memory.shape
    assert not newest.requires_grad


def test_transformer_xl_batch_leaves_no_word_without_room() -> None:
    _, targets = models.spec("transformer_xl_base").batch(8)
    model_room = (0.04, 0.04, 0.01)
    edges = (19_997, 39_997, 199_997, 267_735)
    for low, high, room in zip(edges[:-1], edges[1:], model_room, strict=True):
        share = ((targets >= low) & (targets < high)).float().mean().item()
        assert 0 < share <= room


def test_question_loss_is_the_mean_of_start_and_end() -> None:
    outputs, targets = torch.randn(3, 9, 2), torch.randint(9, (3, 2))
    expected = sum(F.cross_entropy(outputs[..., k], targets[:, k]) for k in (0, 1)) / 2
    torch.testing.assert_close(models.spec("bert_base").criterion(outputs, targets), expected)


def test_sequence_length_is_the_batch_s() -> None:
    spec = models.spec("bert_large")
    assert spec.batch(3, 128, device="meta")[0][0].shape == (3, 128)
    assert spec.batch(3, device="meta")[0][0].shape == (3, 384)


def test_transformer_xl_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = tiny_transformer_xl().eval()
    (tokens, targets, memory), _ = MEMORY_TASK.batch(2, 10, "cpu")
    changed = tokens.clone()
    changed[:, 6] = (tokens[:, 6] + 1) % 20
    before, after = model(tokens, targets, memory)[0], model(changed, targets, memory)[0]
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])
