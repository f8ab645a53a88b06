"""BERT and GPT-2, written from their papers in plain ``torch.nn``.

Shapes: N sequences, T tokens, D hidden size, H heads, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """Softmax attention over (N, H, T, D/H); ``keep`` is False where a key must not be seen.

    Step by step, as the published BERT and GPT-2 runs did it: the (T, T) scores are written to
    memory. The models' option ``fused`` uses ``F.scaled_dot_product_attention`` instead, one
    kernel that need not write them (FlashAttention, Dao et al. 2022).
    """
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    # -10,000 and not minus infinity: it fits in float16, and its exponential is zero anyway.
    weights = scores.masked_fill(~keep, -1e4).softmax(dim=-1)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(N, T, D) to (N, H, T, D/H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(N, H, T, D/H) to (N, T, D)."""
    return x.transpose(1, 2).flatten(2)


class BertLayer(nn.Module):
    """Encoder layer, normalised after each addition (Vaswani et al. 2017, fig. 1 left)."""

    def __init__(self, hidden: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.heads, self.fused = heads, fused

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = (
            split_heads(project(x), self.heads) for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout.p if self.training else 0.0
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, keep, dropout)
        else:
            mixed = attend(query, key, value, keep, dropout)
        x = self.norm1(x + self.dropout(self.output(merge_heads(mixed))))
        return self.norm2(x + self.dropout(self.contract(F.gelu(self.expand(x)))))


class Bert(nn.Module):
    """The encoder of Devlin et al. 2019: uncased vocabulary of 30,522, up to 512 tokens.

    With ``pooler``, returns a vector (N, D) made from the first token; without, the hidden
    states (N, T, D).
    """

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        pooler: bool,
        dropout: float = 0.1,
        fused: bool = False,
        vocabulary: int = 30522,
        positions: int = 512,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(hidden, heads, dropout, fused) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden) if pooler else None
        initialise_normal(self)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        """``tokens``, ``segments`` and ``mask`` (True for a real token) are all (N, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(positions) + self.segments(segments)
        x = self.dropout(self.norm(x))
        keep = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, keep)
        return x if self.pooler is None else torch.tanh(self.pooler(x[:, 0]))


class BertForQuestions(nn.Module):
    """BERT fine-tuned on SQuAD: scores (N, T, 2) for an answer to start and to end at a token.

    It has no pooler: its gradient would be missing, for which DistributedDataParallel waits.
    """

    def __init__(self, layers: int, hidden: int, heads: int, **options: float) -> None:
        super().__init__()
        self.encoder = Bert(layers, hidden, heads, pooler=False, **options)  # type: ignore[arg-type]
        self.span = nn.Linear(hidden, 2)
        initialise_normal(self.span)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        return self.span(self.encoder(tokens, segments, mask))


def initialise_normal(model: nn.Module, deviation: float = 0.02) -> None:
    """Weights from a normal distribution of this deviation, biases zero, as BERT and GPT-2 do."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _bert(
    layers: int, hidden: int, heads: int, head: str, dropout: float, fused: bool
) -> nn.Module:
    if head == "qa":
        return BertForQuestions(layers, hidden, heads, dropout=dropout, fused=fused)
    if head == "none":
        return Bert(layers, hidden, heads, pooler=True, dropout=dropout, fused=fused)
    raise ValueError(f"bert: head is {head!r}, but must be 'qa' (SQuAD) or 'none' (with pooler).")


def bert_base(head: str = "qa", dropout: float = 0.1, fused: bool = False) -> nn.Module:
    """BERT-base uncased: 109,482,240 parameters with pooler and ``head="none"``.

    The default, ``head="qa"``, is the SQuAD model: no pooler, a linear layer to 2; 108,893,186.
    """
    return _bert(12, 768, 12, head, dropout, fused)


def bert_large(head: str = "qa", dropout: float = 0.1, fused: bool = False) -> nn.Module:
    """BERT-large uncased: 335,141,888 parameters with ``head="none"``, 334,094,338 with "qa"."""
    return _bert(24, 1024, 16, head, dropout, fused)


class Gpt2Block(nn.Module):
    """Decoder layer, normalised before attention and before the MLP (Radford et al. 2019)."""

    def __init__(self, hidden: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.heads, self.fused = heads, fused

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        packed = self.query_key_value(self.norm1(x))
        query, key, value = (split_heads(part, self.heads) for part in packed.chunk(3, dim=-1))
        dropout = self.dropout.p if self.training else 0.0
        if self.fused:
            mixed = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True
            )
        else:
            mixed = attend(query, key, value, keep, dropout)
        x = x + self.dropout(self.output(merge_heads(mixed)))
        inner = F.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.contract(inner))


class Gpt2(nn.Module):
    """Tokens (N, T), T up to 1024, to the next token's scores (N, T, V).

    The scores reuse the embedding matrix, so it is one parameter with two uses.
    """

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        dropout: float = 0.1,
        fused: bool = False,
        vocabulary: int = 50257,
        positions: int = 1024,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Gpt2Block(hidden, heads, dropout, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        initialise_normal(self)
        for block in self.modules():
            if not isinstance(block, Gpt2Block):
                continue
            # 2 additions a block: without this, the sum's deviation grows with the depth.
            nn.init.normal_(block.output.weight, std=0.02 / math.sqrt(2 * layers))
            nn.init.normal_(block.contract.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        keep = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        x = self.dropout(self.words(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x, keep)
        return F.linear(self.norm(x), self.words.weight)


def gpt2(dropout: float = 0.1, fused: bool = False) -> Gpt2:
    """GPT-2 small: 124,439,808 parameters."""
    return Gpt2(12, 768, 12, dropout, fused)


def gpt2_medium(dropout: float = 0.1, fused: bool = False) -> Gpt2:
    """GPT-2 medium: 354,823,168 parameters."""
    return Gpt2(24, 1024, 16, dropout, fused)
