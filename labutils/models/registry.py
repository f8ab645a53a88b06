"""The models by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.models import inception, language, small, transformer_xl, vision
from labutils.models.spec import MakeOptimizer, ModelSpec, from_module
from labutils.models.tasks import (
    Classification,
    Inputs,
    NextToken,
    NextTokenWithMemory,
    Questions,
    Task,
    Vectors,
)

Options = dict[str, Any]
"""All options of a model's function, defaults filled in."""


@dataclass(frozen=True, slots=True)
class _Entry:
    build: Callable[..., nn.Module]
    task: Callable[[Options], Task]
    optimizer: MakeOptimizer
    parameters: int
    source: str


def _images(channels: int, size: int) -> Callable[[Options], Task]:
    return lambda options: Classification(shape=(channels, size, size), classes=options["classes"])


def _vectors(width: str) -> Callable[[Options], Task]:
    return lambda options: Classification(shape=(options[width],), classes=options["classes"])


def _bert_task(options: Options) -> Task:
    return (Vectors if options["head"] == "none" else Questions)(vocabulary=30522)


def _gpt2_task(options: Options) -> Task:
    return NextToken(vocabulary=50257)


def _transformer_xl_task(options: Options) -> Task:
    return NextTokenWithMemory(
        layers=16,
        hidden=410 if options["paper"] else 512,
        edges=(*transformer_xl.CUTOFFS, transformer_xl.VOCABULARY),
        shares=transformer_xl.TAIL_SHARES,
        seq=150 if options["paper"] else 192,
    )


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, as in the residual network paper (section 3.4)."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def _slow_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For networks that diverge at 0.1: no batch norm, or none in every layer."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at the paper's rate. The published speeds use LAMB: as much memory, same reads."""
    return torch.optim.Adam(parameters, lr=2.5e-4)


def _adamw(lr: float) -> MakeOptimizer:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)


_HE = "He et al. 2016, arXiv:1512.03385; count: torchvision model documentation"
_XIE = "Xie et al. 2017, arXiv:1611.05431; count: torchvision model documentation"
_BERT = "Devlin et al. 2019, arXiv:1810.04805; count: Hugging Face BertForQuestionAnswering"
_GPT2 = "Radford et al. 2019; count: Hugging Face gpt2 and gpt2-medium"

_MODELS: dict[str, _Entry] = {
    "mlp": _Entry(
        small.mlp, _vectors("inputs"), _slow_sgd, 669_706, "784-512-512-10, Keras mnist_mlp"
    ),
    "small_cnn": _Entry(
        small.small_cnn, _images(1, 28), _slow_sgd, 1_199_882, "PyTorch MNIST example"
    ),
    "tiny_layers": _Entry(
        small.tiny_layers, _vectors("width"), _slow_sgd, 54_570, "200 x (16 x 16 + 16) + 170"
    ),
    "resnet_small": _Entry(
        small.resnet_small, _images(3, 32), _sgd, 269_722, "He et al. 2016, table 6 (0.27 M)"
    ),
    "resnet18": _Entry(vision.resnet18, _images(3, 224), _sgd, 11_689_512, _HE),
    "resnet50": _Entry(vision.resnet50, _images(3, 224), _sgd, 25_557_032, _HE),
    "resnet101": _Entry(vision.resnet101, _images(3, 224), _sgd, 44_549_160, _HE),
    "resnext50_32x4d": _Entry(vision.resnext50_32x4d, _images(3, 224), _sgd, 25_028_904, _XIE),
    "resnext101_32x8d": _Entry(vision.resnext101_32x8d, _images(3, 224), _sgd, 88_791_336, _XIE),
    "vgg16": _Entry(
        vision.vgg16,
        _images(3, 224),
        _slow_sgd,
        138_357_544,
        "Simonyan and Zisserman 2015, arXiv:1409.1556; count: torchvision model documentation",
    ),
    "inception_v3": _Entry(
        inception.inception_v3,
        _images(3, 299),
        _sgd,
        27_161_264,
        "Szegedy et al. 2016, arXiv:1512.00567; count: torchvision model documentation",
    ),
    "bert_base": _Entry(language.bert_base, _bert_task, _adamw(3e-5), 108_893_186, _BERT),
    "bert_large": _Entry(language.bert_large, _bert_task, _adamw(3e-5), 334_094_338, _BERT),
    "gpt2": _Entry(language.gpt2, _gpt2_task, _adamw(2.5e-4), 124_439_808, _GPT2),
    "gpt2_medium": _Entry(language.gpt2_medium, _gpt2_task, _adamw(2.5e-4), 354_823_168, _GPT2),
    "transformer_xl_base": _Entry(
        transformer_xl.transformer_xl_base,
        _transformer_xl_task,
        _adam,
        191_950_298,
        "Dai et al. 2019, arXiv:1901.02860, in the sizes of NVIDIA DeepLearningExamples",
    ),
}


def names() -> list[str]:
    """The names that :func:`create` and :func:`spec` know."""
    return list(_MODELS)


def spec(name: str, **options: Any) -> ModelSpec:
    """The spec of a model by name; ``options`` are those of the function of that name.

    Raises:
        ValueError: no model has this name (the nearest are listed), or it has no such option.
    """
    entry = _MODELS.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, _MODELS, n=3) or list(_MODELS)
        raise ValueError(f"There is no model named {name!r}; did you mean {', '.join(near)}?")
    signature = inspect.signature(entry.build)
    unknown = sorted(options.keys() - signature.parameters.keys())
    if unknown:
        known = ", ".join(signature.parameters)
        raise ValueError(f"{name} has no option {', '.join(unknown)}; its options are {known}.")
    bound = signature.bind(**options)
    bound.apply_defaults()
    return ModelSpec(
        name=name,
        build=partial(entry.build, **options),
        task=entry.task(dict(bound.arguments)),
        optimizer=entry.optimizer,
        parameters=None if options else entry.parameters,
        source=entry.source,
    )


def create(name: str, **options: Any) -> nn.Module:
    """A freshly initialised model: ``create("resnet50")``, ``create("tiny_layers", n=500)``.

    Raises:
        ValueError: as :func:`spec`, or an option has an impossible value.
    """
    return spec(name, **options).build()


def resolve(
    model: str | ModelSpec | nn.Module,
    *,
    example: tuple[Tensor | Inputs, Tensor] | None = None,
    criterion: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    optimizer: MakeOptimizer | None = None,
    **options: Any,
) -> ModelSpec:
    """The spec of whatever a user may call a model: a name, a spec, or a module of their own.

    A module needs ``example``, a batch ``(inputs, targets)``, and its ``criterion`` compares its
    outputs with the targets. ``options`` go with a name. ``optimizer`` replaces the usual one.

    Raises:
        ValueError: an unknown name, a module without an example, options without a name, or
            something else altogether.
    """
    if not isinstance(model, str | ModelSpec | nn.Module):
        kind = type(model).__name__
        raise ValueError(
            f"model is of type {kind}, but must be a name, a ModelSpec or an nn.Module."
        )
    if options and not isinstance(model, str):
        given = ", ".join(sorted(options))
        raise ValueError(f"Only a model given by name takes options; leave out {given}.")
    if isinstance(model, nn.Module):
        if example is None:
            kind = type(model).__name__
            raise ValueError(f"{kind} needs an example batch: pass example=(inputs, targets).")
        return from_module(model, example, criterion=criterion, optimizer=optimizer or _slow_sgd)
    found = spec(model, **options) if isinstance(model, str) else model
    return replace(found, optimizer=optimizer) if optimizer else found


def parameter_count(model: nn.Module) -> int:
    """The number of trainable numbers; one that is used twice counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
