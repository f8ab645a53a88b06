"""What happens when PyTorch runs an operation on virtual tensors.

Every operation arrives in :func:`dispatch`, runs on the wrapped tensors, is counted in the ledger
(by :func:`labutils.virtual.tensor.wrap`) and written to the recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from labutils.virtual import errors, journal, kernels
from labutils.virtual.memory import Block
from labutils.virtual.operators import Operator, operator_of
from labutils.virtual.record import Kernel
from labutils.virtual.state import state
from labutils.virtual.streams import current_device
from labutils.virtual.tensor import CPU, META, Signature, VirtualTensor, adopt, wrap

_graph_task = torch._C._current_graph_task_id
_CACHE_LIMIT = 50_000
_PLAIN = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device})
"""Types of arguments that cannot hold a tensor."""
_kernels: dict[Any, Kernel] = {}
_phantoms: dict[Any, tuple[tuple[Any, ...], bool]] = {}


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on virtual tensors (what ``__torch_dispatch__`` does)."""
    operator = operator_of(func)
    if operator.handler is not None:
        return operator.handler(func, args, kwargs)
    return run(operator, args, kwargs)


class Call:
    """The arguments of one call, taken out of their wrappers."""

    __slots__ = ("args", "cpu", "index", "inputs", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs: list[VirtualTensor] = []
        self.cpu: list[torch.Tensor] = []
        self.args = [a if type(a) in _PLAIN else self.unwrap(a) for a in args]
        self.kwargs = {k: self.unwrap(v) for k, v in kwargs.items()} if kwargs else kwargs
        self.index = self.inputs[0].index if self.inputs else -1

    def unwrap(self, value: Any) -> Any:
        kind = type(value)
        if kind is VirtualTensor:
            self.inputs.append(value)
            return value.raw
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple:
            if value and type(value[0]) is int:
                return value  # a shape, strides, dimensions
            return [self.unwrap(v) for v in value]
        if isinstance(value, torch.Tensor):
            self.cpu.append(value)
        return value


def run(
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    implementation: Callable[..., Any] | None = None,
) -> Any:
    """Run an ordinary operator: same function, wrapped tensors, results on the same device.

    Args:
        implementation: what to call on the wrapped tensors; the operator itself if None.
    """
    call = Call(args, kwargs)
    inputs = call.inputs
    if kwargs and "device" in kwargs:
        target = _choose_device(call, kwargs["device"])
        if target is None:
            return operator.call(*call.args, **call.kwargs)
    index = call.index
    if index < 0:
        index = call.index = current_device()
    for tensor in inputs:
        if tensor.index != index:
            raise RuntimeError(errors.mixed_devices(operator.name, inputs, call.cpu))
    if call.cpu:
        _check_cpu_tensors(operator, call)
    result = implementation(*call.args) if implementation else _compute(operator, call)
    return _finish(operator, call, args, kwargs, result)


def _finish(
    operator: Operator, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """Wrap the results, and write the call to the recorder."""
    inputs, index, returns = call.inputs, call.index, operator.returns
    outputs: Sequence[VirtualTensor] = ()
    if returns == "fresh":
        if type(result) is torch.Tensor:
            made: Any = wrap(result, index)
            outputs = (made,)
        else:
            made = _wrap_all(result, index, None)
            outputs = _tensors(made)
    elif returns == "view":
        made = _wrap_all(result, index, inputs[0].block if inputs else None)
    elif returns == "self":
        made = args[0]
        if operator.changes_shape:
            made.block.resize(call.args[0].untyped_storage().nbytes())
            adopt(made, wrap(call.args[0], index, made.block))
    elif returns == "out":
        made = _fit_outputs(operator, kwargs)
    else:
        made = None
    kernel = _kernel(operator, call, outputs, result)
    journal.record(index, kernel, inputs, outputs)
    if operator.needs_values and (operator.data is None or _masks(inputs)):
        journal.note("sync", index)
    return made


def _masks(inputs: list[VirtualTensor]) -> bool:
    """Whether one of the indices is a mask."""
    return any(t.signature[2] is torch.bool for t in inputs[1:])


def _wrap_all(value: Any, index: int, block: Block | None) -> Any:
    if isinstance(value, torch.Tensor):
        return wrap(value, index, block)
    if isinstance(value, list | tuple):
        return type(value)([_wrap_all(v, index, block) for v in value])
    return value


def _tensors(made: Any) -> list[VirtualTensor]:
    items = made if type(made) in (list, tuple) else (made,)
    return [t for t in items if type(t) is VirtualTensor]


def _fit_outputs(operator: Operator, kwargs: dict[str, Any]) -> Any:
    """The ``out=`` tensors, whose shapes the call may have changed."""
    outs = [kwargs[name] for name in operator.outs]
    for out in tree_leaves(outs):
        if type(out) is VirtualTensor and out.raw.shape != out.shape:
            out.block.resize(out.raw.untyped_storage().nbytes())
            adopt(out, wrap(out.raw, out.index, out.block))
    if not operator.func._schema.returns:
        return None
    return outs[0] if len(outs) == 1 else tuple(outs)


def _choose_device(call: Call, device: Any) -> int | None:
    """Device number that a ``device=`` argument asks for; None for the CPU."""
    if device is None:
        return call.index
    device = torch.device(device)
    if device.type == "cpu" and call.inputs:
        device = torch.device("vgpu", call.index)  # C++ means "where the argument is"
    place = CPU
    if device.type == "vgpu":
        call.index = current_device() if device.index is None else errors.check_index(device.index)
        place = META if state.phantom else CPU
    call.kwargs = {k: v for k, v in call.kwargs.items() if k != "pin_memory"}
    call.kwargs["device"] = place if device.type in ("vgpu", "cpu") else device
    return call.index if device.type == "vgpu" else None


def _compute(operator: Operator, call: Call) -> Any:
    """The result on plain tensors; phantom calls seen before are answered from memory."""
    if not state.phantom or operator.returns != "fresh":
        try:
            return operator.call(*call.args, **call.kwargs)
        except NotImplementedError as error:
            if state.phantom and operator.returns == "none":
                return None  # works in place, such as an optimizer's fused step: nothing to compute
            raise errors.explain(error, operator.name, call.inputs, call.index) from None
        except RuntimeError as error:
            raise errors.explain(error, operator.name, call.inputs, call.index) from None
    try:
        key = (operator, _freeze(call.args), _freeze(call.kwargs))
        known = _phantoms.get(key)
    except TypeError:
        return operator.call(*call.args, **call.kwargs)
    if known is None:
        try:
            result = operator.call(*call.args, **call.kwargs)
        except RuntimeError as error:
            raise errors.explain(error, operator.name, call.inputs, call.index) from None
        items = result if isinstance(result, tuple) else (result,)
        if all(t is None or (type(t) is torch.Tensor and t.device == META) for t in items):
            if len(_phantoms) >= _CACHE_LIMIT:
                _phantoms.clear()
            recipe = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in items)
            _phantoms[key] = (recipe, isinstance(result, tuple))
        return result
    recipe, several = known
    made = tuple(
        None if r is None else torch.empty_strided(r[0], r[1], dtype=r[2], device=META)
        for r in recipe
    )
    return made if several else made[0]


def _freeze(value: Any) -> Any:
    """A hashable stand-in that decides the shape of a result; float values do not."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in value.items())
    return float if type(value) is float else (type(value), value)


def _check_cpu_tensors(operator: Operator, call: Call) -> None:
    """CPU tensors with one element and no dimension may take part, as with CUDA; others may not.

    In a backward they all may: formulas in C++ make tensors "where the gradient is", which to C++
    is the CPU.
    """
    suspects = call.cpu
    if operator.data is not None:
        data = [call.args[i] for i in operator.data if i < len(call.args)]
        suspects = [t for t in call.cpu if any(t is d for d in data)]
    in_backward = _graph_task() != -1
    for tensor in suspects:
        if (tensor.dim() and not in_backward) or not call.inputs:
            raise RuntimeError(errors.mixed_devices(operator.name, call.inputs, call.cpu))
    if state.phantom and operator.data is None:
        call.args = [_to_meta(a) for a in call.args]
        call.kwargs = {k: _to_meta(v) for k, v in call.kwargs.items()}


def _to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_meta(v) for v in value]
    return value.to(META) if isinstance(value, torch.Tensor) else value


def _kernel(
    operator: Operator, call: Call, outputs: Sequence[VirtualTensor], result: Any
) -> Kernel:
    signatures = tuple([t.signature for t in call.inputs])
    made = tuple([t.signature for t in outputs])
    key = (operator, signatures, made)
    kernel = _kernels.get(key)
    if kernel is None:
        if len(_kernels) >= _CACHE_LIMIT:
            _kernels.clear()
        kernel = _kernels[key] = kernels.describe(
            operator.func,
            operator.name,
            operator.kind,
            tuple(call.args),
            call.kwargs,
            signatures,
            made,
            _overwritten(operator, call),
            result,
        )
    return kernel


def _overwritten(operator: Operator, call: Call) -> list[Signature]:
    found: list[Signature] = []
    for position in operator.written:
        if position < len(call.args):
            value = call.args[position]
            for raw in value if isinstance(value, list) else [value]:
                if isinstance(raw, torch.Tensor):
                    found.append((raw.shape, raw.stride(), raw.dtype))
    return found


def _torch_dispatch(
    cls: type, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    return dispatch(func, args, kwargs or {})


VirtualTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]
