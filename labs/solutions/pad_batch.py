"""A collate function for sequences of different lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

lab = "01"


def pad_batch(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    batch = samples[0].new_zeros(len(samples), int(lengths.max()))
    for row, sample in zip(batch, samples, strict=True):
        row[: len(sample)] = sample
    return batch, lengths


def cases(rng: random.Random) -> Iterator[tuple[list[torch.Tensor]]]:
    for sizes in ([2], [3, 1], [1, 4, 2], [rng.randint(1, 9) for _ in range(6)]):
        yield ([torch.randint(1, 100, (size,)) for size in sizes],)
    yield ([torch.rand(size) + 1 for size in (2, 3)],)


hints = [
    "Find the longest sample, and make a tensor of zeros [samples, longest] of the samples' dtype.",
    "samples[0].new_zeros(rows, columns) has the dtype and device of the samples.",
    "Fill row i up to the length of sample i; return the lengths too, as a tensor of integers.",
]
