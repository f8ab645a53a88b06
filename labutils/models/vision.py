"""Image classifiers, written from their papers in plain ``torch.nn``.

Every network maps images (N, 3, H, W) to class scores (N, classes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand by 4, added to the input (He et al. 2016, fig. 5 right).

    The stride sits on the 3x3 convolution ("version 1.5"), as in the runs whose speed is
    published. ``groups`` > 1 makes it the ResNeXt block (Xie et al. 2017, fig. 3c).
    """

    expansion = 4

    def __init__(
        self, inputs: int, planes: int, stride: int = 1, groups: int = 1, group_width: int = 64
    ) -> None:
        super().__init__()
        width = planes * group_width * groups // 64
        outputs = planes * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions added to the input (He et al. 2016, fig. 5 left)."""

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = _shortcut(inputs, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity, or a 1x1 convolution where the shape changes (option B of the paper)."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Residual network for 224x224 images (He et al. 2016, table 1).

    ``depths`` is the number of blocks in the four stages; a stage halves the image and doubles
    the channels of the one before it.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        classes: int = 1000,
        **block_options: int,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = []
        channels = 64
        for index, depth in enumerate(depths):
            planes = 64 * 2**index
            blocks = []
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(block(channels, planes, stride, **block_options))
                channels = planes * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)))


def initialise_convolutions(model: nn.Module) -> None:
    """Draw convolution weights so that activations keep their variance (He et al. 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def resnet18(classes: int = 1000) -> ResNet:
    """ResNet-18, 11,689,512 parameters at 1000 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50 v1.5, 25,557,032 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def resnet101(classes: int = 1000) -> ResNet:
    """ResNet-101 v1.5, 44,549,160 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes)


def resnext50_32x4d(classes: int = 1000) -> ResNet:
    """ResNeXt-50 with 32 groups of 4 channels, 25,028,904 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, groups=32, group_width=4)


def resnext101_32x8d(classes: int = 1000) -> ResNet:
    """ResNeXt-101 with 32 groups of 8 channels, 88,791,336 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes, groups=32, group_width=8)


def vgg16(classes: int = 1000) -> nn.Sequential:
    """VGG-16, 138,357,544 parameters at 1000 classes (Simonyan and Zisserman 2015, table 1, D).

    Nine tenths of the parameters are in three fully connected layers that do hardly any of the
    arithmetic, which makes it the classic model whose gradients are slow to all-reduce.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, classes),
    )
    model = nn.Sequential(nn.Sequential(*layers), classifier)
    initialise_convolutions(model)
    return model
