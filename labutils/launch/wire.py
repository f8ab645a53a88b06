"""What travels between the notebook and a rank: framed messages, and Python objects by value.

A message is a small tuple (its first item says what it is) and, where needed, a *packed* object.
Packing uses cloudpickle, so that functions and classes of a notebook travel as they are.  Large
tensors and arrays are not copied into the pickle: their bytes follow it as they lie in memory.
Tensors of any device arrive on the CPU, so that a result never wakes a GPU in the notebook.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

_HEADER = struct.Struct("!QI")  # bytes of the tuple, number of parts that follow
_LENGTH = struct.Struct("!Q")
_LARGE = 64 << 20  # bytes from which on it is looked whether there is room
_IN_BAND = 64 * 1024  # smaller buffers are copied into the pickle: fewer parts


class CannotSend(TypeError):
    """An object that cannot travel between processes; the message names it."""


class Packed:
    """An object as bytes: a pickle, and the large buffers that belong to it."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(memoryview(part).nbytes for part in self.parts)

    def load(self) -> Any:
        """The object itself.  Tensors keep the received bytes as their storage."""
        return pickle.loads(self.parts[0], buffers=self.parts[1:])


def pack(value: Any) -> Packed:
    """Turn ``value`` into bytes; raises whatever its pickling raises."""
    buffers: list[Any] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
    return Packed([stream.getbuffer(), *buffers])


def pack_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Packed:
    """Pack a call; raises :class:`CannotSend` that names what in it cannot travel."""
    try:
        return pack((function, args, kwargs))
    except Exception as error:
        culprit = _culprit(function, args, kwargs)
        name = getattr(function, "__name__", "the function")
        raise CannotSend(
            f"{name} cannot be sent to the ranks because {culprit} cannot travel between processes "
            f"({type(error).__name__}: {error}); create it inside the function instead."
        ) from None


def _culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    code = getattr(function, "__code__", None)
    known = getattr(function, "__globals__", {})
    uses = [(f"the global {n!r}", known[n]) for n in getattr(code, "co_names", ()) if n in known]
    cells = zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or ())
    uses += [(f"the variable {n!r} around it", cell.cell_contents) for n, cell in cells]
    uses += [(f"argument {i}", value) for i, value in enumerate(args)]
    uses += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    for text, value in uses:
        try:
            pack(value)
        except Exception:
            return f"{text} ({type(value).__name__})"
    return "something that it uses"


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided:
            plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
            if obj.device.type not in ("cpu", "meta") or (plain and obj.device.type == "cpu"):
                return _rebuild, _as_bytes(obj)
        if isinstance(obj, types.CodeType):
            # cloudpickle forgets the file, which every report and traceback needs.
            make, parts, *_ = self.dispatch_table[types.CodeType](obj)
            return _code, (make, parts, obj.co_filename)
        return super().reducer_override(obj)


def _code(make: Callable[..., Any], parts: tuple[Any, ...], filename: str) -> Any:
    return make(*parts).replace(co_filename=filename)


def _as_bytes(tensor: torch.Tensor) -> tuple[Any, ...]:
    host = tensor.detach().cpu()
    if host.is_conj() or host.is_neg():
        host = host.resolve_conj().resolve_neg()
    raw: Any = host.contiguous().reshape(-1).view(torch.uint8).numpy()
    leaf_grad = tensor.requires_grad and tensor.is_leaf
    parameter = isinstance(tensor, torch.nn.Parameter)
    return pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape), leaf_grad, parameter


def _rebuild(
    raw: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, parameter: bool
) -> torch.Tensor:
    if memoryview(raw).nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:  # small buffers come inside the pickle, as bytes, which a tensor must not write to
        raw = bytearray(raw) if memoryview(raw).readonly else raw
        tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    return (
        torch.nn.Parameter(tensor, requires_grad)
        if parameter
        else tensor.requires_grad_(requires_grad)
    )


class Channel:
    """One end of the connection between the notebook and a rank; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: tuple[Any, ...], packed: Packed | None = None) -> None:
        """Send; raises OSError when the other end is gone."""
        head = pickle.dumps(message)
        parts = [] if packed is None else packed.parts
        lengths = b"".join(_LENGTH.pack(memoryview(part).nbytes) for part in parts)
        with self._lock:
            self.sock.sendall(_HEADER.pack(len(head), len(parts)) + lengths + head)
            for part in parts:
                self.sock.sendall(part)

    def recv(self, room: Callable[[], int] | None = None) -> tuple[tuple[Any, ...], Packed]:
        """The next message; raises EOFError when the other end is gone.

        A large object for which ``room()`` has not enough bytes is a MemoryError; the channel is
        then of no use.
        """
        size, count = _HEADER.unpack(self._exactly(_HEADER.size))
        lengths = [_LENGTH.unpack(self._exactly(_LENGTH.size))[0] for _ in range(count)]
        if room is not None and sum(lengths) > _LARGE and sum(lengths) > (free := room()):
            raise MemoryError(
                f"its result has {sum(lengths) / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB "
                "are free here; return a part of it, or save it to a file"
            )
        message = pickle.loads(self._exactly(size))
        return message, Packed([self._exactly(length) for length in lengths])

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view.nbytes:
            try:
                got = self.sock.recv_into(view, min(view.nbytes, 1 << 24))
            except ConnectionError:
                got = 0
            if not got:
                raise EOFError("the other end of the channel is gone")
            view = view[got:]
        return data

    def close(self) -> None:
        self.sock.close()
