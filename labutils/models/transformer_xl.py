"""Transformer-XL (Dai et al. 2019): attention over this segment and a memory of the last one.

Shapes: N sequences, T tokens of this segment, M of memory, K = M + T, D hidden, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.models.language import initialise_normal, merge_heads, split_heads

VOCABULARY = 267_735
CUTOFFS = (19_997, 39_997, 199_997)
"""Words of WikiText-103 by falling frequency, in the four clusters of the published runs."""

TAIL_SHARES = (0.031, 0.031, 0.003)
"""Estimated share of the text's words that falls in each cluster after the first.

From a power law through two points of WikiText-103's 103 million words: the word of rank 20,000
is seen about 300 times, and the last one 3 times (rarer words were removed from the data).
"""


class AdaptiveSoftmax(nn.Module):
    """Softmax over a large vocabulary, cheap because most words are frequent (Grave et al. 2017).

    A head scores the frequent words and one entry per tail cluster; a word's log-probability in
    the tail is its cluster's plus its own within the cluster. The word vectors are the input
    embedding's (given to ``forward``), only biases and cluster vectors belong here.

    A tail cluster is computed only for the words that are in it. How many is known once the
    targets are; so that shapes never depend on data, each cluster has room for a fixed share of
    the words, ``room``. A word that finds no room is trained as far as its cluster. With
    ``room=None`` there is room for all: exact, and several times slower.
    """

    def __init__(
        self, hidden: int, vocabulary: int, cutoffs: Sequence[int], room: Sequence[float] | None
    ) -> None:
        super().__init__()
        self.clusters = nn.Parameter(torch.zeros(len(cutoffs), hidden))
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))
        self.word_bias = nn.Parameter(torch.zeros(vocabulary))
        self.edges = (*cutoffs, vocabulary)
        self.room = tuple(room) if room is not None else (1.0,) * len(cutoffs)

    def forward(self, hidden: Tensor, targets: Tensor, words: Tensor) -> Tensor:
        """Loss (N,) of each target, from ``hidden`` (N, D), ``targets`` (N,), ``words`` (V, D)."""
        short = self.edges[0]
        scores = F.linear(
            hidden,
            torch.cat([words[:short], self.clusters]),
            torch.cat([self.word_bias[:short], self.cluster_bias]),
        )
        entry = targets
        for cluster, low in enumerate(self.edges[:-1]):
            entry = torch.where(targets >= low, short + cluster, entry)
        log_probability = F.log_softmax(scores, dim=-1).gather(1, entry[:, None]).squeeze(1)
        for cluster, room in enumerate(self.room):
            log_probability = self._add_tail(
                cluster, math.ceil(room * len(targets)), log_probability, hidden, targets, words
            )
        return -log_probability

    def _add_tail(
        self,
        cluster: int,
        room: int,
        log_probability: Tensor,
        hidden: Tensor,
        targets: Tensor,
        words: Tensor,
    ) -> Tensor:
        low, high = self.edges[cluster], self.edges[cluster + 1]
        member = (targets >= low) & (targets < high)
        # Members first, then others that fill the room and are weighted by zero.
        chosen = torch.topk(member.to(hidden.dtype), room).indices
        scores = F.linear(hidden[chosen], words[low:high], self.word_bias[low:high])
        own = (targets[chosen] - low).clamp(0, high - low - 1)
        within = F.log_softmax(scores, dim=-1).gather(1, own[:, None]).squeeze(1)
        within = within * member[chosen].to(within.dtype)
        return log_probability.index_add(0, chosen, within.to(log_probability.dtype))


class RelativeAttention(nn.Module):
    """Attention that knows how far back a token is, not where it is (section 3.3 of the paper).

    The score of query i and key j is (q_i + u) . k_j + (q_i + v) . r_(i-j): what the key says,
    and how far away it is.
    """

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.distance = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(
        self, x: Tensor, memory: Tensor, distances: Tensor, u: Tensor, v: Tensor, hide: Tensor
    ) -> Tensor:
        # Queries of the memory are computed and dropped, as in the published runs: one product.
        packed = self.query_key_value(torch.cat([memory, x], dim=1))
        query, key, value = (split_heads(part, self.heads) for part in packed.chunk(3, dim=-1))
        query = query[:, :, -x.shape[1] :]
        relative = split_heads(self.distance(distances)[None], self.heads)
        content = (query + u[:, None]) @ key.transpose(-1, -2)
        position = shift((query + v[:, None]) @ relative.transpose(-1, -2))
        scores = (content + position) / math.sqrt(query.shape[-1])
        weights = self.dropout(scores.masked_fill(hide, -1e4).softmax(dim=-1))
        return self.output(merge_heads(weights @ value))


def shift(scores: Tensor) -> Tensor:
    """Turn scores (N, H, T, K) by distance K-1 ... 0 into scores by key (appendix B).

    Row i must move left by T-1-i places. One column of padding in front makes each row one
    longer, so that reading the same numbers in rows of K again moves each row by one more.
    Entries above the diagonal are leftovers; the causal mask hides them.
    """
    queries, keys = scores.shape[-2:]
    padded = F.pad(scores, (1, 0)).flatten(-2)
    return padded[..., queries:].unflatten(-1, (queries, keys))


class TransformerXLLayer(nn.Module):
    """Relative attention and a ReLU network, each added to its input and normalised."""

    def __init__(
        self, hidden: int, heads: int, inner: int, dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.attention = RelativeAttention(hidden, heads, attention_dropout)
        self.norm1 = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, inner)
        self.contract = nn.Linear(inner, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, *context)))
        inner = self.dropout(F.relu(self.expand(x)))
        return self.norm2(x + self.dropout(self.contract(inner)))


class TransformerXL(nn.Module):
    """Tokens and next tokens (N, T), memory (N, layers, M, D) to (losses (N, T), new memory).

    The loss is computed inside, for the adaptive softmax needs the targets. The new memory is
    what each layer saw, without gradient: pass it in with the text's next segment. A text starts
    with a memory of zeros.
    """

    inverse_wavelength: Tensor

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        inner: int,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        vocabulary: int = VOCABULARY,
        cutoffs: Sequence[int] = CUTOFFS,
        room: Sequence[float] | None = (0.04, 0.04, 0.01),
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.softmax = AdaptiveSoftmax(hidden, vocabulary, cutoffs, room)
        self.layers = nn.ModuleList(
            TransformerXLLayer(hidden, heads, inner, dropout, attention_dropout)
            for _ in range(layers)
        )
        self.u = nn.Parameter(torch.zeros(heads, hidden // heads))
        self.v = nn.Parameter(torch.zeros(heads, hidden // heads))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer(
            "inverse_wavelength", 10000 ** -(torch.arange(0, hidden, 2) / hidden), persistent=False
        )
        initialise_normal(self)

    def forward(self, tokens: Tensor, targets: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        length, remembered = tokens.shape[1], memory.shape[2]
        x = self.dropout(self.words(tokens) * math.sqrt(self.words.embedding_dim))
        distances = self.dropout(self._distances(length + remembered))
        hide = torch.ones(length, length + remembered, dtype=torch.bool, device=tokens.device).triu(
            1 + remembered
        )
        seen = []
        for layer, layer_memory in zip(self.layers, memory.unbind(1), strict=True):
            seen.append(x.detach())
            x = layer(x, layer_memory, distances, self.u, self.v, hide)
        losses = self.softmax(self.dropout(x).flatten(0, 1), targets.flatten(), self.words.weight)
        return losses.view_as(targets), self._remember(memory, torch.stack(seen, dim=1))

    def _distances(self, length: int) -> Tensor:
        """Sinusoids (K, D) of the distances K-1 ... 0 (Vaswani et al. 2017, section 3.5)."""
        wavelength = self.inverse_wavelength
        steps = torch.arange(length - 1, -1, -1, device=wavelength.device, dtype=wavelength.dtype)
        angles = steps[:, None] * wavelength
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    @staticmethod
    def _remember(memory: Tensor, seen: Tensor) -> Tensor:
        """The newest M of all states seen so far."""
        room = memory.shape[2]
        if seen.shape[2] == room:
            return seen
        return torch.cat([memory, seen.to(memory.dtype)], dim=2)[:, :, seen.shape[2] :]


def transformer_xl_base(
    paper: bool = False, dropout: float = 0.1, room: Sequence[float] | None = (0.04, 0.04, 0.01)
) -> TransformerXL:
    """Transformer-XL base for WikiText-103: 191,950,298 parameters.

    Sizes of NVIDIA's DeepLearningExamples (hidden 512, 8 heads, inner 2048; segment and memory
    192), whose speed is published. ``paper=True`` is the paper's own base model (410, 10, 2100;
    150), which its training log counts as 151,107,538 parameters, the paper as 151 M.
    ``room``: see :class:`AdaptiveSoftmax`.
    """
    hidden, heads, inner = (410, 10, 2100) if paper else (512, 8, 2048)
    return TransformerXL(16, hidden, heads, inner, dropout, room=room)
