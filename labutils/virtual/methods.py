"""Methods of virtual tensors that PyTorch does not route through its dispatcher."""

from __future__ import annotations

import copy
from typing import Any

import torch

from labutils.virtual import copies
from labutils.virtual.tensor import VirtualTensor, adopt, nested, wrap

_Tensor: Any = torch.Tensor


def _device(self: VirtualTensor) -> torch.device:
    return torch.device("vgpu", self.index)


def _to(self: VirtualTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to``: the tensor itself where nothing changes, else a copy."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    kwargs = dict(kwargs)
    must_copy = kwargs.pop("copy", False) or any(a is True for a in args[3:])
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
    same = device is None or (device.type == "vgpu" and device.index in (None, self.index))
    if same and dtype in (None, self.dtype) and memory_format is None and not must_copy:
        return self
    asked = {"dtype": dtype or self.dtype, "memory_format": memory_format}
    options: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
    if same:
        return torch.ops.aten._to_copy(self, **options)
    if device.type == "meta":
        return torch.empty_like(self.raw, device="meta", dtype=options["dtype"])
    if device.type not in ("vgpu", "cpu"):
        return self.cpu().to(device, **options)
    return copies.to(self, device, non_blocking=non_blocking, **options)


def _copy_(self: VirtualTensor, source: torch.Tensor, non_blocking: bool = False) -> VirtualTensor:
    """``Tensor.copy_``; a source elsewhere that needs a gradient is moved here first."""
    if source.requires_grad and source.device != self.device and torch.is_grad_enabled():
        source = source.to(self.device, non_blocking=non_blocking)
    return _Tensor.copy_(self, source, non_blocking)


def to_virtual(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to`` of a plain tensor to a virtual GPU."""
    if self.is_nested:
        raise nested()
    kwargs.pop("copy", None)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
    options = {"dtype": dtype, "memory_format": memory_format}
    options = {k: v for k, v in options.items() if v is not None}
    return copies.to(self, device, non_blocking=non_blocking, **options)


def vgpu(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> torch.Tensor:
    """The tensor on a virtual GPU, as ``Tensor.cuda`` has it for CUDA (the current one if None)."""
    from labutils.virtual.streams import index_of

    return self.to(torch.device("vgpu", index_of(device)), non_blocking=non_blocking, **kwargs)


def _cpu(self: VirtualTensor, **kwargs: Any) -> torch.Tensor:
    return self.to("cpu", **kwargs)


def _numpy(self: VirtualTensor, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("force"):
        return self.detach().cpu().numpy()
    raise TypeError(
        f"can't convert vgpu:{self.index} device type tensor to numpy. Use Tensor.cpu() to copy "
        "the tensor to host memory first."
    )


def _tolist(self: VirtualTensor) -> Any:
    return self.detach().cpu().tolist()


def _repr(self: VirtualTensor, *, tensor_contents: Any = None) -> str:
    if self.raw.is_meta:
        inside = f"..., size={tuple(self.shape)}, dtype={self.dtype}, phantom"
        text = f"tensor({inside})"
    else:
        text = repr(self.raw.detach())
    suffix = f", device='vgpu:{self.index}'"
    if self.grad_fn is not None:
        suffix += f", grad_fn=<{type(self.grad_fn).__name__}>"
    elif self.requires_grad:
        suffix += ", requires_grad=True"
    return f"{text[:-1]}{suffix})"


def _format(self: VirtualTensor, spec: str) -> str:
    if self.dim() == 0:
        return repr(self) if self.raw.is_meta else format(self.item(), spec)
    return object.__format__(self, spec)


def _set_data(self: VirtualTensor, value: torch.Tensor) -> None:
    if type(value) is VirtualTensor:
        adopt(self, wrap(value.raw, value.index, value.block))
    else:
        swap_data(self, value)


def _data(self: VirtualTensor) -> VirtualTensor:
    return wrap(self.raw, self.index, self.block)


def _grad(self: VirtualTensor) -> torch.Tensor | None:
    """The gradient; one that backward's C++ made of nothing (zeros) is on the CPU until here."""
    gradient: torch.Tensor | None = _plain_grad.__get__(self)
    if gradient is not None and type(gradient) is not VirtualTensor:
        gradient = wrap(gradient.to("meta") if self.raw.is_meta else gradient, self.index)
        _plain_grad.__set__(self, gradient)
    return gradient


def _set_grad(self: VirtualTensor, value: torch.Tensor | None) -> None:
    if value is not None and value.device != self.device:
        raise RuntimeError(
            f"assigned grad has data located on a different device: the tensor is on {self.device},"
            f" the gradient on {value.device}."
        )
    _plain_grad.__set__(self, value)


_plain_grad = _Tensor.grad


def _type(self: VirtualTensor, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
    """``Tensor.type``: the name of the type, or the tensor as another."""
    if dtype is None:
        return str(_Tensor.type(self)).replace("torch.", "torch.vgpu.")
    if isinstance(dtype, torch.dtype):
        return self.to(dtype, non_blocking=non_blocking)
    return self.cpu().type(dtype)


def _new(self: VirtualTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self.raw.new(*args, **kwargs).to(self.device)


def _no_dlpack(self: VirtualTensor, *args: Any, **kwargs: Any) -> Any:
    raise BufferError(f"a tensor on vgpu:{self.index} cannot be exported: use .cpu() first.")


def swap_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value`` where one of them is virtual and the other is not.

    The gradient moves along: it could not be moved by itself, being held from C++.
    """
    fresh = value.detach()
    fresh = torch.nn.Parameter(fresh) if isinstance(tensor, torch.nn.Parameter) else fresh
    fresh.requires_grad_(tensor.requires_grad)
    gradient = _plain_grad.__get__(tensor)
    torch.utils.swap_tensors(tensor, fresh)
    if gradient is not None:
        _plain_grad.__set__(tensor, gradient.detach().to(value.device))


def _new_tensor(self: VirtualTensor, data: Any, **kwargs: Any) -> torch.Tensor:
    options = {"dtype": self.dtype, "device": self.device, **kwargs}
    return torch.tensor(data, **options)


def _deepcopy(self: VirtualTensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment. Use .detach().clone() to copy this one."
        )
    made: torch.Tensor = self.detach().clone()
    if isinstance(self, torch.nn.Parameter):
        made = torch.nn.Parameter(made, self.requires_grad)
    made.requires_grad_(self.requires_grad)
    memo[id(self)] = made
    if self.grad is not None:
        made.grad = copy.deepcopy(self.grad, memo)
    return made


def _data_ptr(self: VirtualTensor) -> int:
    """Address of the first element; phantom storages have made-up addresses, all different."""
    offset = self.raw.storage_offset() * self.dtype.itemsize
    return id(self.block) + int(offset) if self.raw.is_meta else self.raw.data_ptr()


def install(cls: type[VirtualTensor]) -> None:
    """Give ``cls`` these methods."""
    cls.device = property(_device)  # type: ignore[assignment]
    cls.data = property(_data, _set_data)  # type: ignore[assignment]
    cls.grad = property(_grad, _set_grad, _plain_grad.__delete__)  # type: ignore
    cls.is_cpu = property(lambda self: False)  # type: ignore[assignment]
    cls.is_vgpu = property(lambda self: True)  # type: ignore[attr-defined]
    methods: dict[str, Any] = {
        "get_device": lambda self: self.index,
        "to": _to,
        "copy_": _copy_,
        "cpu": _cpu,
        "vgpu": vgpu,
        "numpy": _numpy,
        "__array__": _numpy,
        "__dlpack__": _no_dlpack,
        "tolist": _tolist,
        "type": _type,
        "new": _new,
        "__repr__": _repr,
        "__format__": _format,
        "__deepcopy__": _deepcopy,
        "new_tensor": _new_tensor,
        "data_ptr": _data_ptr,
        "untyped_storage": lambda self: self.raw.untyped_storage(),
        "record_stream": lambda self, stream: None,
        "is_pinned": lambda self, *args: False,
        "pin_memory": lambda self, *args: copies._refuse_pinning(None, (self,), {}),
    }
    for name, method in methods.items():
        setattr(cls, name, method)
