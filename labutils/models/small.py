"""Models small enough to train on a laptop's CPU while you watch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from labutils.models.vision import initialise_convolutions


def mlp(inputs: int = 784, width: int = 512, depth: int = 2, classes: int = 10) -> nn.Sequential:
    """Multi-layer perceptron on flattened images: ``depth`` hidden layers of ``width`` units.

    The default 784-512-512-10 has 669,706 parameters.
    """
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def small_cnn(classes: int = 10) -> nn.Sequential:
    """Two convolutions and two linear layers for 28x28 grey images; 1,199,882 parameters.

    The shape of PyTorch's own MNIST example. There is neither dropout nor batch norm, so
    training on 1 or on N devices gives the same numbers.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class TinyLayers(nn.Module):
    """``n`` residual layers of ``width`` x ``width``: a lot of launches, hardly any arithmetic.

    Replicating it costs far more than computing it, so ``DataParallel`` makes it slower.
    """

    def __init__(self, n: int = 200, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n))
        self.scores = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            # Divided by the depth so that the sum over all layers keeps its size.
            x = x + F.relu(layer(x)) / len(self.layers)
        return self.scores(x)


def tiny_layers(n: int = 200, width: int = 16, classes: int = 10) -> TinyLayers:
    """A stack of ``n`` tiny layers on vectors of ``width`` numbers."""
    return TinyLayers(n, width, classes)


class _SmallBlock(nn.Module):
    """Residual block whose shortcut has no parameters (option A of He et al. 2016)."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.stride = stride
        self.missing = planes - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(kept, (0, 0, 0, 0, 0, self.missing)))


def resnet_small(depth: int = 20, classes: int = 10) -> nn.Sequential:
    """ResNet for 32x32 images (He et al. 2016, section 4.2): ``depth`` 20, 32, 44, 56 or 110.

    ResNet-20 has 269,722 parameters (the paper's table 6: 0.27 M).
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"resnet_small: depth is {depth}, but must be 6n + 2, such as 20 or 56.")
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    channels = 16
    for planes in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            layers.append(_SmallBlock(channels, planes, stride=planes // channels))
            channels = planes
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )
    initialise_convolutions(model)
    return model
