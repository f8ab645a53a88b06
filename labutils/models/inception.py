"""Inception-v3 (Szegedy et al. 2016), with the auxiliary classifier it is trained with.

Every block is a handful of parallel branches whose outputs are concatenated, so the network
is written as just that: :class:`Fork` of sequences of convolutions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.models.vision import initialise_convolutions

Size = int | tuple[int, int]


class Fork(nn.Module):
    """Run every branch on the same input and concatenate their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def conv(
    inputs: int, outputs: int, kernel: Size, stride: int = 1, same: bool = True
) -> nn.Sequential:
    """Convolution, batch norm, ReLU; ``same`` pads so that stride 1 keeps the image size."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if same else 0
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
        nn.ReLU(inplace=True),
    )


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    """The pooling branch: a 3x3 average, then a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), conv(inputs, outputs, 1))


def block_5x5(inputs: int, pool: int) -> Fork:
    """35x35 block (fig. 5): gives 224 + ``pool`` channels."""
    return Fork(
        conv(inputs, 64, 1),
        nn.Sequential(conv(inputs, 48, 1), conv(48, 64, 5)),
        nn.Sequential(conv(inputs, 64, 1), conv(64, 96, 3), conv(96, 96, 3)),
        pooled(inputs, pool),
    )


def block_7x7(width: int) -> Fork:
    """17x17 block (fig. 6): 7x7 convolutions factored in 1x7 and 7x1; 768 channels in and out."""
    row, column = (1, 7), (7, 1)
    return Fork(
        conv(768, 192, 1),
        nn.Sequential(conv(768, width, 1), conv(width, width, row), conv(width, 192, column)),
        nn.Sequential(
            conv(768, width, 1),
            conv(width, width, column),
            conv(width, width, row),
            conv(width, width, column),
            conv(width, 192, row),
        ),
        pooled(768, 192),
    )


def block_wide(inputs: int) -> Fork:
    """8x8 block (fig. 7): the branches fork once more; gives 2048 channels."""

    def split(channels: int) -> Fork:
        return Fork(conv(channels, 384, (1, 3)), conv(channels, 384, (3, 1)))

    return Fork(
        conv(inputs, 320, 1),
        nn.Sequential(conv(inputs, 384, 1), split(384)),
        nn.Sequential(conv(inputs, 448, 1), conv(448, 384, 3), split(384)),
        pooled(inputs, 192),
    )


def reduce_to_17() -> Fork:
    """Halve 35x35x288 to 17x17x768 (fig. 10)."""
    return Fork(
        conv(288, 384, 3, stride=2, same=False),
        nn.Sequential(conv(288, 64, 1), conv(64, 96, 3), conv(96, 96, 3, stride=2, same=False)),
        nn.MaxPool2d(3, stride=2),
    )


def reduce_to_8() -> Fork:
    """Halve 17x17x768 to 8x8x1280."""
    return Fork(
        nn.Sequential(conv(768, 192, 1), conv(192, 320, 3, stride=2, same=False)),
        nn.Sequential(
            conv(768, 192, 1),
            conv(192, 192, (1, 7)),
            conv(192, 192, (7, 1)),
            conv(192, 192, 3, stride=2, same=False),
        ),
        nn.MaxPool2d(3, stride=2),
    )


class InceptionV3(nn.Module):
    """Images (N, 3, 299, 299) to scores (N, classes).

    While training it returns ``(scores, auxiliary_scores)``: a second, small classifier on the
    17x17 features gives the lower layers a shorter path to the loss (section 4 of the paper).
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv(3, 32, 3, stride=2, same=False),
            conv(32, 32, 3, same=False),
            conv(32, 64, 3),
            nn.MaxPool2d(3, stride=2),
            conv(64, 80, 1),
            conv(80, 192, 3, same=False),
            nn.MaxPool2d(3, stride=2),
        )
        self.at_35 = nn.Sequential(block_5x5(192, 32), block_5x5(256, 64), block_5x5(288, 64))
        self.at_17 = nn.Sequential(
            reduce_to_17(), block_7x7(128), block_7x7(160), block_7x7(160), block_7x7(192)
        )
        self.at_8 = nn.Sequential(reduce_to_8(), block_wide(1280), block_wide(2048))
        self.classifier = nn.Linear(2048, classes)
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, stride=3),
            conv(768, 128, 1),
            conv(128, 768, 5, same=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(768, classes),
        )
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        middle = self.at_17(self.at_35(self.stem(images)))
        features = F.adaptive_avg_pool2d(self.at_8(middle), 1).flatten(1)
        scores = self.classifier(F.dropout(features, 0.5, self.training))
        if self.training:
            return scores, self.auxiliary(middle)
        return scores


def inception_v3(classes: int = 1000) -> InceptionV3:
    """Inception-v3, 27,161,264 parameters at 1000 classes, auxiliary classifier included."""
    return InceptionV3(classes)
