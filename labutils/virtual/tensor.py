"""The tensor of a virtual GPU, and what happens when PyTorch runs an operation on it.

A :class:`VirtualTensor` wraps a plain tensor: a CPU tensor that holds the values, or a meta tensor
when compute is phantom.  To PyTorch's C++ it is a CPU tensor, so autograd and DDP need no device of
their own; to Python it is on ``vgpu:i``.  Every operation arrives in :func:`dispatch`, runs on the
wrapped tensors, is counted in the ledger and written to the recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from labutils.virtual import kernels
from labutils.virtual.memory import Block
from labutils.virtual.record import Entry, HostThread, Kernel
from labutils.virtual.state import state
from labutils.virtual.streams import current_device, current_stream_id

_CPU = torch.device("cpu")
_META = torch.device("meta")
_make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU.  Made by ``.to("vgpu:0")``, ``torch.zeros(device="vgpu")``, …"""

    raw: torch.Tensor
    """The plain tensor with the values (CPU) or only the shape (meta)."""
    index: int
    """Number of the device."""
    block: Block
    """The storage, as the ledger counts it; shared by views."""
    signature: kernels.Signature

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["raw"], self.index

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], index: int, size: Any, stride: Any
    ) -> VirtualTensor:
        return wrap(inner["raw"], index)


def wrap(raw: torch.Tensor, index: int, block: Block | None = None) -> VirtualTensor:
    """Put the plain tensor ``raw`` on device ``index``, on ``block`` or on memory of its own.

    Raises:
        torch.OutOfMemoryError: the device has not that much left.
    """
    shape, stride, dtype = raw.shape, raw.stride(), raw.dtype
    if block is None:
        block = Block(state.ledger, index, raw.untyped_storage().nbytes())
    made: VirtualTensor = _make_wrapper(
        VirtualTensor,
        shape,
        strides=stride,
        storage_offset=raw.storage_offset(),
        dtype=dtype,
        device=_CPU,
    )
    made.raw = raw
    made.index = index
    made.block = block
    made.signature = (shape, stride, dtype)
    return made


def adopt(tensor: torch.Tensor, source: VirtualTensor) -> None:
    """Make ``tensor`` be what ``source`` is, as ``tensor.data = source`` does."""
    _set_data(tensor, source)
    tensor.raw = source.raw  # type: ignore[attr-defined]
    tensor.index = source.index  # type: ignore[attr-defined]
    tensor.block = source.block  # type: ignore[attr-defined]
    tensor.signature = source.signature  # type: ignore[attr-defined]


_set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__


class Operator:
    """What is known of one ATen overload before it is called."""

    __slots__ = ("allows_cpu", "func", "handler", "kind", "name", "pointwise", "returns", "written")

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.name = func.overloadpacket.__name__
        self.handler = HANDLERS.get(func.overloadpacket)
        if func.namespace == "c10d":
            self.handler = COLLECTIVES
        self.pointwise = torch.Tag.pointwise in func.tags
        self.allows_cpu = self.name in _TAKES_CPU_TENSORS
        self.written = tuple(
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        )
        self.returns = _returns(self.name, schema)
        self.kind = "view" if self.returns == "view" else kernels.kind_of(self.name)


# Index tensors may lie on the CPU, as they may for CUDA tensors.
_TAKES_CPU_TENSORS = {"index", "_index_put_impl_", "index_put", "index_put_", "_unsafe_index"}
_MAY_ALIAS = {"_unsafe_view", "_reshape_alias", "lift_fresh", "unsafe_split", "unsafe_chunk"}
"""Operators whose result shares its argument's memory though their schema does not say so."""
_CHANGES_SHAPE = {"t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_"}
_NEEDS_VALUES = {"nonzero", "masked_select", "_unique2", "equal", "unique_dim", "is_nonzero"}
"""Operators whose result's size depends on values: with CUDA the host waits for them."""
_FACTORY_KEYS = {"device", "pin_memory", "layout", "dtype"}


def _returns(name: str, schema: Any) -> str:
    """How the results relate to the arguments: fresh, view, self, out or none."""
    if not schema.returns:
        return "none"
    alias = schema.returns[0].alias_info
    if name in _MAY_ALIAS:
        return "view"
    if alias is None:
        return "view" if name in ("split", "unbind", "chunk", "split_with_sizes") else "fresh"
    if not alias.is_write:
        return "view"
    return "out" if any(a.name == "out" or a.is_out for a in schema.arguments) else "self"


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Operators that are not just "run it on the wrapped tensors" (filled by the modules beside)."""
_operators: dict[OpOverload, Operator] = {}
_kernels: dict[Any, Kernel] = {}
_phantoms: dict[Any, tuple[tuple[Any, ...], bool]] = {}
_CACHE_LIMIT = 50_000


COLLECTIVES: Callable[..., Any] | None = None
"""Runs ``c10d`` operators (set by ``labutils.virtual.distributed``)."""
WAIT_FOR: Callable[..., None] | None = None
"""Waits for the collectives that still own a tensor (set by the same)."""


def operator_of(func: OpOverload) -> Operator:
    """The :class:`Operator` of ``func``, made at its first use."""
    operator = _operators.get(func)
    if operator is None:
        operator = _operators[func] = Operator(func)
    return operator


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on virtual tensors (what ``__torch_dispatch__`` does)."""
    operator = _operators.get(func) or operator_of(func)
    if operator.handler is not None:
        return operator.handler(func, args, kwargs)
    return run(operator, args, kwargs)


class Call:
    """The arguments of one call, taken out of their wrappers."""

    __slots__ = ("args", "cpu", "index", "inputs", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs: list[VirtualTensor] = []
        self.cpu: list[torch.Tensor] = []
        self.args = [self.unwrap(a) for a in args]
        self.kwargs = {k: self.unwrap(v) for k, v in kwargs.items()} if kwargs else kwargs
        self.index = self.inputs[0].index if self.inputs else -1

    def unwrap(self, value: Any) -> Any:
        kind = type(value)
        if kind is VirtualTensor:
            self.inputs.append(value)
            return value.raw
        if kind is list or kind is tuple:
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
            return operator.func(*call.args, **call.kwargs)
    index = call.index
    if index < 0:
        index = call.index = current_device()
    for tensor in inputs:
        if tensor.index != index:
            raise RuntimeError(_mixed(operator, inputs, call.cpu))
    if call.cpu and not operator.allows_cpu:
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
        if operator.name in _CHANGES_SHAPE:
            adopt(made, wrap(call.args[0], index, made.block))
    elif returns == "out":
        made = _fit_outputs(inputs, kwargs)
    else:
        made = None
    kernel = _kernel(operator, call, outputs, result)
    record(index, kernel, inputs, outputs)
    if operator.name in _NEEDS_VALUES:
        note("sync", index)
    return made


def _wrap_all(value: Any, index: int, block: Block | None) -> Any:
    if isinstance(value, torch.Tensor):
        return wrap(value, index, block)
    if isinstance(value, list | tuple):
        return type(value)(_wrap_all(v, index, block) for v in value)
    return value


def _tensors(made: Any) -> list[VirtualTensor]:
    items = made if isinstance(made, list | tuple) else (made,)
    return [t for t in items if type(t) is VirtualTensor]


def _fit_outputs(inputs: list[VirtualTensor], kwargs: dict[str, Any]) -> Any:
    """The ``out=`` tensors, whose shapes the call may have changed."""
    outs = [v for v in kwargs.values() if type(v) is VirtualTensor] or inputs[-1:]
    for out in outs:
        if out.raw.shape != out.shape:
            out.block.resize(out.raw.untyped_storage().nbytes())
            adopt(out, wrap(out.raw, out.index, out.block))
    return outs[0] if len(outs) == 1 else tuple(outs)


def _choose_device(call: Call, device: Any) -> int | None:
    """Device number that a ``device=`` argument asks for; None for the CPU."""
    if device is None:
        return call.index
    device = torch.device(device)
    if device.type == "cpu" and call.inputs:
        device = torch.device("vgpu", call.index)  # C++ means "where the argument is"
    place = _CPU
    if device.type == "vgpu":
        call.index = current_device() if device.index is None else check_index(device.index)
        place = _META if state.phantom else _CPU
    call.kwargs = {k: v for k, v in call.kwargs.items() if k != "pin_memory"}
    call.kwargs["device"] = place if device.type in ("vgpu", "cpu") else device
    return call.index if device.type == "vgpu" else None


def check_index(index: int) -> int:
    """``index`` itself, if there is such a virtual GPU.

    Raises:
        RuntimeError: there is none (CUDA says "invalid device ordinal").
    """
    if index >= state.devices:
        raise RuntimeError(
            f"vgpu error: invalid device ordinal. vgpu:{index} does not exist: there are "
            f"{state.devices} virtual GPUs, vgpu:0 to vgpu:{state.devices - 1}."
        )
    return index


def _compute(operator: Operator, call: Call) -> Any:
    """The result on plain tensors; phantom calls seen before are answered from memory."""
    if not state.phantom or operator.returns != "fresh":
        try:
            return operator.func(*call.args, **call.kwargs)
        except RuntimeError as error:
            raise explain(error, operator.name, call.inputs) from None
    try:
        key = (operator.func, _freeze(call.args), _freeze(call.kwargs))
        known = _phantoms.get(key)
    except TypeError:
        return operator.func(*call.args, **call.kwargs)
    if known is None:
        try:
            result = operator.func(*call.args, **call.kwargs)
        except RuntimeError as error:
            raise explain(error, operator.name, call.inputs) from None
        items = result if isinstance(result, tuple) else (result,)
        if all(t is None or (type(t) is torch.Tensor and t.device == _META) for t in items):
            if len(_phantoms) >= _CACHE_LIMIT:
                _phantoms.clear()
            recipe = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in items)
            _phantoms[key] = (recipe, isinstance(result, tuple))
        return result
    recipe, several = known
    made = tuple(
        None if r is None else torch.empty_strided(r[0], r[1], dtype=r[2], device=_META)
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


def explain(error: RuntimeError, name: str, inputs: Sequence[VirtualTensor]) -> Exception:
    """Say in the words of a GPU what the CPU or meta implementation complained about."""
    text = str(error)
    if "DefaultCPUAllocator" in text:
        return torch.OutOfMemoryError(
            f"The host's memory cannot hold the values of {name} on a virtual GPU ({text.strip()})."
            ' Use lab.virtual.enable(..., compute="phantom") for sizes like this.'
        )
    if any(t.raw.is_meta for t in inputs):
        if any(not t.raw.is_meta for t in inputs):
            return RuntimeError(
                f"{name} got tensors made with compute='real' and with compute='phantom'; "
                "make the model and the data again after lab.virtual.enable(...)."
            )
        if isinstance(error, NotImplementedError) or "meta" in text.lower():
            return no_values(name)
    return error


def no_values(name: str) -> RuntimeError:
    """The error for reading a value that phantom compute never made."""
    return RuntimeError(
        f"{name} needs values, and this virtual GPU computes none (compute='phantom': shapes, "
        "memory and time only). Use lab.virtual.enable(..., compute='real') to get values."
    )


def _check_cpu_tensors(operator: Operator, call: Call) -> None:
    """CPU tensors with one element and no dimension may take part, as with CUDA; others may not."""
    for tensor in call.cpu:
        if tensor.dim() or not call.inputs:
            raise RuntimeError(_mixed(operator, call.inputs, call.cpu))
    if state.phantom:
        call.args = [_to_meta(a) for a in call.args]
        call.kwargs = {k: _to_meta(v) for k, v in call.kwargs.items()}


def _to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_meta(v) for v in value]
    return value.to(_META) if isinstance(value, torch.Tensor) else value


def _mixed(operator: Operator, inputs: list[VirtualTensor], cpu: list[torch.Tensor]) -> str:
    """CUDA's sentence for tensors on different devices."""
    devices = list(dict.fromkeys([f"vgpu:{t.index}" for t in inputs] + [str(t.device) for t in cpu]))
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{devices[0]} and {devices[-1]}! (when checking the arguments of {operator.name}). "
        f"Move them to one device first, for example with .to('{devices[0]}')."
    )


def _kernel(
    operator: Operator, call: Call, outputs: Sequence[VirtualTensor], result: Any
) -> Kernel:
    signatures = tuple([t.signature for t in call.inputs])
    made = tuple([t.signature for t in outputs])
    key = (operator.func, signatures, made)
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


def _overwritten(operator: Operator, call: Call) -> list[kernels.Signature]:
    found: list[kernels.Signature] = []
    for position in operator.written:
        if position < len(call.args):
            value = call.args[position]
            for raw in value if isinstance(value, list) else [value]:
                if isinstance(raw, torch.Tensor):
                    found.append((raw.shape, raw.stride(), raw.dtype))
    return found


def record(
    index: int,
    kernel: Kernel,
    inputs: Sequence[VirtualTensor],
    outputs: Sequence[VirtualTensor],
    what: str = "kernel",
    ref: Any = None,
) -> None:
    """Write one operation, and the memory it leaves allocated, to the log."""
    recorder = state.recorder
    host = recorder.host()
    thread = recorder.speaker(host, index)
    if host.task != -1:
        _keep_order(host, thread, inputs)
    stream = current_stream_id(index)
    phase = host.phase or ("backward" if host.task != -1 else "forward")
    for tensor in inputs:
        if tensor.block.event and WAIT_FOR is not None:
            WAIT_FOR(inputs, index, thread, phase)
    number = recorder.append(Entry(what, thread, index, stream, phase, kernel, ref))
    if host.task != -1:
        for tensor in outputs or inputs[:1]:
            tensor.block.writer = (thread, number)
    allocated = state.ledger.allocated[index]
    if recorder.sampled.get(index) != allocated:
        recorder.sampled[index] = allocated
        recorder.append(Entry("memory", thread, index, stream, phase, None, allocated))


def sample_memory(index: int) -> None:
    """Write the device's allocated bytes to the log, if they have changed since the last line."""
    allocated = state.ledger.allocated[index]
    if state.recorder.sampled.get(index) != allocated:
        state.recorder.sampled[index] = allocated
        note("memory", index, allocated)


def note(what: str, index: int, ref: Any = None) -> None:
    """Write a line that is no operation, such as a wait of the host, to the log."""
    recorder = state.recorder
    host = recorder.host()
    thread = recorder.speaker(host, index)
    recorder.append(Entry(what, thread, index, current_stream_id(index), host.phase, None, ref))


def _keep_order(host: HostThread, thread: str, inputs: Sequence[VirtualTensor]) -> None:
    """Within a backward, wait for the engine's other threads that made the inputs."""
    latest: dict[str, int] = {}
    for tensor in inputs:
        writer = tensor.block.writer
        if writer is not None and writer[0] != thread and writer[1] >= host.task_start:
            latest[writer[0]] = max(writer[1], latest.get(writer[0], 0))
    for name in sorted(latest):
        state.recorder.append(Entry("after", thread, -1, 0, "backward", None, latest[name]))
