"""How long a GPU computes on matrix products and convolutions.

A library splits a product into output tiles, one thread block each.  Size enters three times: every
tile takes ``tile_seconds`` beside its main loop over the depth K, which a fast multiprocessor runs
through sooner; tiles run in whole waves over the multiprocessors ("wave quantisation", NVIDIA Deep
Learning Performance Guide); and of several tile shapes the library takes the quickest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..virtual.record import Kernel
from .profiles import ITEM_BYTES, Profile

TILES = (128 * 128, 128 * 64, 64 * 64)
"""Output elements of one thread block: tile shapes that cuBLAS, cuDNN and CUTLASS all have."""
NARROWEST = 32
"""Columns of the narrowest tile; a group of a grouped convolution that has fewer fills one."""


class Product(NamedTuple):
    """A matrix product: ``flops`` to be done for ``outputs`` elements."""

    flops: float
    outputs: float
    winograd: bool = False
    """A 3 x 3 convolution of stride 1, which can be done with fewer multiplications."""
    gradient: bool = False
    """Of a convolution by its input or weight."""


def arithmetic_seconds(kernel: Kernel, dtype: str, profile: Profile) -> float:
    """Seconds of arithmetic of a gemm, conv or attention ``kernel`` in ``dtype``."""
    peak = profile.gpu.peak.get(dtype, profile.gpu.peak["float32"])  # runs as float32 otherwise
    padding = _alignment(kernel, dtype) if dtype in profile.gpu.tensor else 1.0
    return padding * sum(
        product.flops / (peak * efficiency(product, kernel.kind, dtype, profile))
        for product in products(kernel)
    )


def _alignment(kernel: Kernel, dtype: str) -> float:
    """What tensor cores compute, over what is needed: they take channels by 16 bytes, so that the
    three of an image become four (TF32) or eight (NVIDIA, convolutional layers user's guide)."""
    place = 2 if kernel.name == "convolution_backward" else 1
    if kernel.kind != "conv" or len(kernel.shapes) <= place or kernel.shapes[place][1] == 1:
        return 1.0
    channels, lanes = kernel.shapes[place][1], 16 // ITEM_BYTES[dtype]
    return math.ceil(channels / lanes) * lanes / channels


def products(kernel: Kernel) -> list[Product]:
    """The products that a kernel consists of: one, but a convolution's backward has two."""
    outputs = max(1.0, kernel.bytes_written / ITEM_BYTES.get(kernel.dtype, 4))
    if kernel.kind == "conv" and kernel.name == "convolution" and _is_2d(kernel.shapes[:2]):
        image, weight = kernel.shapes[:2]
        area = image[0] * weight[0] * image[2] * image[3]  # outputs if the stride is 1
        padding = _padding(weight[0] * weight[1] // image[1], weight[0], weight[1])
        return [Product(kernel.flops * padding, outputs, _is_3x3(weight) and outputs >= area)]
    if kernel.name == "convolution_backward" and _is_2d(kernel.shapes[:3]):
        return _backward_products(kernel, outputs)
    return [Product(kernel.flops, outputs)]


def _backward_products(kernel: Kernel, outputs: float) -> list[Product]:
    gradient, image, weight = kernel.shapes[:3]
    winograd = _is_3x3(weight) and gradient[2:] == image[2:]
    inputs, weights = math.prod(image), math.prod(weight)
    per_group = weight[0] * weight[1] // image[1]
    to_weight = _padding(per_group, weight[0], weight[1])
    if outputs < inputs:  # the first layer: nobody needs the gradient of the data
        return [Product(kernel.flops * to_weight, weights, winograd, True)]
    half = kernel.flops / 2
    to_image = _padding(weight[1], weight[0], weight[1])
    return [
        Product(half * to_image, inputs, winograd, True),
        Product(half * to_weight, weights, winograd, True),
    ]


def _padding(columns: int, out_channels: int, per_group: int) -> float:
    """What a grouped convolution computes, over what it needs.  One channel per group has kernels
    of its own, which are as quick as memory allows."""
    if per_group == 1 or columns == out_channels:
        return 1.0
    return max(1.0, NARROWEST / columns)


def is_pointwise(kernel: Kernel) -> bool:
    """A 1 x 1 convolution of stride 1 (or its gradient): a plain product for every image."""
    if kernel.name == "convolution" and _is_2d(kernel.shapes[:2]):
        image, weight = kernel.shapes[:2]
        outputs = image[0] * weight[0] * image[2] * image[3] * ITEM_BYTES.get(kernel.dtype, 4)
        return weight[2:] == (1, 1) and kernel.bytes_written >= outputs
    if kernel.name == "convolution_backward" and _is_2d(kernel.shapes[:3]):
        gradient, image, weight = kernel.shapes[:3]
        return weight[2:] == (1, 1) and gradient[2:] == image[2:]
    return False


def _is_2d(shapes: tuple[tuple[int, ...], ...]) -> bool:
    return len(shapes) > 1 and all(len(shape) == 4 for shape in shapes)


def _is_3x3(weight: tuple[int, ...]) -> bool:
    return weight[2:] == (3, 3)


def efficiency(product: Product, kind: str, dtype: str, profile: Profile) -> float:
    """The fraction of peak that a product reaches; above 1 where Winograd saves multiplications."""
    model, tensor = profile.model, dtype in profile.gpu.tensor
    best = model.tensor_efficiency if tensor else model.simt_efficiency
    if kind == "conv":
        best *= model.tensor_conv_efficiency if tensor else model.conv_efficiency
        best *= model.gradient_efficiency if product.gradient else 1.0
        if product.winograd and not tensor:
            best *= model.winograd_gain
    elif kind == "attention":
        best *= model.attention_efficiency
    peak = profile.gpu.peak.get(dtype, profile.gpu.peak["float32"])
    return best * max(_filled(product, area, peak, profile) for area in TILES)


def _filled(product: Product, area: int, peak: float, profile: Profile) -> float:
    """The share of time that multiprocessors spend in main loops, with tiles of that ``area``.

    Long sums are split among blocks when there are too few tiles, as cuBLAS and cuDNN do.
    """
    processors, overhead = profile.gpu.multi_processor_count, profile.model.tile_seconds
    loop = product.flops / product.outputs * area / (peak / processors)
    tiles = math.ceil(product.outputs / area)
    split = max(1, min(processors // tiles, int(loop / (4 * overhead))))
    waves, loop = tiles * split / processors, loop / split
    return loop / (loop + overhead) * waves / math.ceil(waves)


__all__ = [
    "TILES", "Product", "arithmetic_seconds", "efficiency", "is_pointwise",
    "products",
]  # fmt: skip
