"""What a call of torch.distributed is about: operation, tensors, group, root, user's line."""

from __future__ import annotations

import os
import sys
import zlib
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Spec:
    """How the arguments of one function of torch.distributed are to be read."""

    tensor: str = ""
    """The argument whose dtype and shape must agree on all ranks."""
    payload: str = ""
    """The argument whose bytes are the message, as nccl-tests count them (default: ``tensor``)."""
    reduces: bool = False
    root: str = ""
    """``src`` or ``dst``, for calls with a root or a peer."""
    shapes: bool = True
    """Shapes must agree (an all-to-all may be uneven)."""


COLLECTIVES = {
    "all_reduce": Spec("tensor", reduces=True),
    "broadcast": Spec("tensor", root="src"),
    "reduce": Spec("tensor", reduces=True, root="dst"),
    "all_gather": Spec("tensor", "tensor_list"),
    "all_gather_single": Spec("input_tensor", "output_tensor"),
    "all_gather_into_tensor": Spec("input_tensor", "output_tensor"),
    "gather": Spec("tensor", root="dst"),
    "scatter": Spec("tensor", root="src"),
    "reduce_scatter": Spec("output", "input_list", reduces=True),
    "reduce_scatter_single": Spec("input", reduces=True),
    "reduce_scatter_tensor": Spec("input", reduces=True),
    "all_to_all_single": Spec("input", shapes=False),
    "all_to_all": Spec("input_tensor_list", shapes=False),
    "barrier": Spec(),
    "monitored_barrier": Spec(),
}

PEER_TO_PEER = {
    "send": Spec("tensor", root="dst"),
    "isend": Spec("tensor", root="dst"),
    "recv": Spec("tensor", root="src"),
    "irecv": Spec("tensor", root="src"),
}


@dataclass(slots=True)
class Call:
    """One call on one rank."""

    op: str
    group: str
    """Name of the process group, the same on all its ranks."""
    members: tuple[int, ...]
    """Global ranks of the group."""
    tensor: str
    """E.g. ``float32 (4,)``; empty for a barrier."""
    reduction: str
    root: int
    """Global rank of the root or the peer, -1 if there is none."""
    nbytes: int
    peer: bool
    comparable: str
    """What must be equal on all ranks."""
    asynchronous: bool = False
    where: str = ""
    chain: int = 0
    """Checksum of the user's lines from the call outwards."""
    sequence: int = 0
    series: str = ""
    """What it is numbered in."""
    trail: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """E.g. ``all_reduce #4 of float32 (4,), sum``."""
        return (
            f"{self.op} #{self.sequence}{self.detail}" if self.sequence else self.op + self.detail
        )

    @property
    def detail(self) -> str:
        parts = f" of {self.tensor}" if self.tensor else ""
        parts += f", {self.reduction}" if self.reduction else ""
        if self.root >= 0:
            word = "to" if self.op in ("send", "isend", "reduce", "gather") else "from"
            parts += f" {word} rank {self.root}"
        return parts


def describe(op: str, arguments: dict[str, Any]) -> Call | None:
    """The call with these bound arguments; None if this rank is not in the group."""
    peer = op in PEER_TO_PEER
    spec = PEER_TO_PEER[op] if peer else COLLECTIVES[op]
    group = arguments.get("group") or dist.group.WORLD
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    members = tuple(dist.get_process_group_ranks(group))
    tensors = _tensors(arguments.get(spec.tensor)) if spec.tensor else []
    payload = _tensors(arguments.get(spec.payload)) if spec.payload else tensors
    dtype, shape = _describe_tensors(tensors)
    reduction = _reduction(arguments.get("op")) if spec.reduces else ""
    root = _root(spec.root, arguments, group) if spec.root else -1
    agreed = [op, dtype, shape if spec.shapes else "", reduction, "" if peer else str(root)]
    call = Call(
        op, group.group_name, members, f"{dtype} {shape}".strip(), reduction, root,
        sum(t.numel() * t.element_size() for t in payload), peer, "\x1f".join(agreed),
        bool(arguments.get("async_op")) or op in ("isend", "irecv"),
    )  # fmt: skip
    call.trail = user_lines(sys._getframe(2))
    call.where = call.trail[0] if call.trail else ""
    call.chain = zlib.crc32("\0".join(call.trail).encode())
    return call


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in value or () if isinstance(t, torch.Tensor)]


def _describe_tensors(tensors: list[torch.Tensor]) -> tuple[str, str]:
    if not tensors:
        return "", ""
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    shapes = [str(tuple(t.shape)) for t in tensors]
    return "/".join(dtypes), shapes[0] if len(shapes) == 1 else f"[{', '.join(shapes)}]"


def _reduction(op: Any) -> str:
    text = str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()
    return text if text.isidentifier() else "reduce-op"


def _root(side: str, arguments: dict[str, Any], group: Any) -> int:
    inside = arguments.get(f"group_{side}")
    if inside is not None:
        return int(dist.get_global_rank(group, inside))
    given = arguments.get(side)
    if given is None:  # from anybody, or the default root 0
        return -1 if side == "src" and "tag" in arguments else 0
    return int(given)


def is_users(filename: str) -> bool:
    """Whether a frame of this file is the user's: not torch's, not ours, not Python's own."""
    return not (
        filename.startswith((_PACKAGE, _TORCH, _STDLIB, "<frozen ", "<string>"))
        or "site-packages" in filename
    )


def user_lines(frame: FrameType | None, limit: int = 8) -> list[str]:
    """``file, line n`` of the user's frames, from the innermost outwards."""
    lines: list[str] = []
    while frame is not None and len(lines) < limit:
        filename = frame.f_code.co_filename
        if is_users(filename):
            lines.append(f"{filename}, line {frame.f_lineno}")
        frame = frame.f_back
    return lines
