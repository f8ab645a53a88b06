"""Recordings that have been made, so that a question about the same model is answered at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..models import ModelSpec, resolve
from ..models.spec import MakeOptimizer
from .bench import record
from .recording import Recording, Setting

KEPT = 64
"""Recordings kept; each has some thousand small entries."""

_recordings: OrderedDict[Any, tuple[Any, Recording]] = OrderedDict()


@dataclass(frozen=True)
class Source:
    """A model to record, and what tells it from others."""

    spec: ModelSpec
    key: tuple[Any, ...]
    owner: Any
    """Kept alive, so that no other object gets its identity."""


def source(
    model: str | ModelSpec | nn.Module,
    example: Any,
    criterion: Callable[[Any, Tensor], Tensor],
    optimizer: MakeOptimizer | None,
) -> Source:
    """The source that a user means; raises ``ValueError`` as ``models.resolve`` does."""
    spec = resolve(model, example=example, criterion=criterion, optimizer=optimizer)
    owner = (model, criterion, optimizer)
    if isinstance(model, nn.Module):
        module = model
        spec = replace(spec, build=lambda: module)  # recording takes a copy without values
        key: tuple[Any, ...] = (id(model), _shapes(model), str(model), _example(example))
    else:
        key = (model if isinstance(model, str) else id(model),)
    return Source(spec, (*key, id(criterion), id(optimizer)), owner)


Recorder = Callable[[Source, Setting], Recording]


class NotRecorded(LookupError):
    """A recording that has not been made; see :func:`known`."""

    def __init__(self, source: Source, setting: Setting) -> None:
        super().__init__(f"{source.spec.name} has not been recorded with {setting}")
        self.source, self.setting = source, setting


def recording(source: Source, setting: Setting) -> Recording:
    """The recording of a setting, made at its first use."""
    return remember(source, ("recorded", setting), lambda: record(source.spec, setting))


def known(source: Source, setting: Setting) -> Recording:
    """The recording of a setting, if it has been made; raises ``NotRecorded``."""

    def missing() -> Recording:
        raise NotRecorded(source, setting)

    return remember(source, ("recorded", setting), missing)


def put(source: Source, setting: Setting, made: Recording) -> None:
    """Keep a recording that was made elsewhere."""
    remember(source, ("recorded", setting), lambda: made)


def remember(source: Source, what: Any, make: Callable[[], Recording]) -> Recording:
    """What ``make`` made when ``what`` was first asked of this source."""
    key = (source.key, what)
    if key not in _recordings:
        _recordings[key] = source.owner, make()
        if len(_recordings) > KEPT:
            _recordings.popitem(last=False)
    _recordings.move_to_end(key)
    return _recordings[key][1]


def _shapes(model: nn.Module) -> tuple[Any, ...]:
    """What changes when layers are replaced or frozen."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def _example(example: Any) -> tuple[Any, ...]:
    inputs, targets = example
    tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    return tuple((t.shape, t.dtype) for t in (*tensors, targets))


__all__ = ["NotRecorded", "Recorder", "Source", "known", "put", "recording", "remember", "source"]
