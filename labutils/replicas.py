"""Are the replicas of a model still equal?  Asked from inside the ranks, at any moment."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labutils.launch.verdict import names as name_ranks


class ReplicasDiffer(RuntimeError):
    """The replicas of a model are not equal; the message names the first tensor that differs."""


@dataclass(frozen=True)
class Piece:
    """Something that is to be equal on all ranks."""

    name: str
    kind: str
    value: Any
    """A tensor, or something whose ``repr`` counts."""

    @property
    def label(self) -> str:
        if not isinstance(self.value, torch.Tensor):
            return f"{self.name} ({self.value!r})"
        dtype = str(self.value.dtype).removeprefix("torch.")
        return f"{self.name} ({self.kind}, {dtype} {tuple(self.value.shape)})"

    def digest(self) -> int:
        """A checksum of every bit (CRC-32), the same on any device."""
        if not isinstance(self.value, torch.Tensor):
            return zlib.crc32(repr(self.value).encode())
        return zlib.crc32(_bytes(self.value), zlib.crc32(self.label.encode()))


def check_replicas(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Compare a model, and its optimizer, over the ranks of a process group.

    Call it on every rank, between two steps.  Checksums travel, and one tensor if something
    differs.  Buffers may differ between two forward passes (each rank's BatchNorm has seen its own
    batch, and DDP copies rank 0's before the next pass), so they are reported and raise nothing.

    Args:
        module: a ``DistributedDataParallel``, or the module itself.
        optimizer: its state and settings (learning rates, …) are compared as well.
        group: the process group; all ranks if None.

    Returns:
        One sentence: what was compared, and what is to be known of the buffers.

    Raises:
        ReplicasDiffer: on every rank; names the first tensor that differs, where, and by how much.
        ValueError: the tensors have no values (meta tensors, phantom GPUs).
        TypeError: the arguments are no module and optimizer.
    """
    _check_arguments(module, optimizer)
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    pieces = [Piece(n, "parameter", p) for n, p in inner.named_parameters()]
    parameters = len(pieces)
    pieces += _optimizer_pieces(inner, optimizer)
    buffers = [Piece(n, "buffer", b) for n, b in inner.named_buffers()]
    _refuse_phantoms([*pieces, *buffers])
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    what = f"{parameters} parameters"
    if optimizer is not None:
        what += f" and {len(pieces) - parameters} pieces of optimizer state"
    if world == 1:
        return f"There is one replica, of {what}: nothing to compare."
    if (found := _first_difference(pieces, group)) is not None:
        raise ReplicasDiffer(found)
    equal = f"{world} replicas are equal: {what}{_about_buffers(module, buffers, group)}"
    return equal + _about_values(pieces)


def _check_arguments(module: Any, optimizer: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"check_replicas needs a model (an nn.Module) first, not {type(module).__name__}: "
            "check_replicas(ddp, optimizer)."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "the second argument of check_replicas is an optimizer of torch.optim, or left out; "
            f"{type(optimizer).__name__} is none."
        )


def _about_values(pieces: Sequence[Piece]) -> str:
    """Equal, but no numbers any more: that should not pass for health."""
    bad = [
        p for p in pieces
        if isinstance(p.value, torch.Tensor) and p.value.is_floating_point()
        and not p.value.detach().isfinite().all()
    ]  # fmt: skip
    if not bad:
        return ""
    return f"  But {len(bad)} of them hold NaN or infinity; the first is {bad[0].label}."


def _optimizer_pieces(
    module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[Piece]:  # fmt: skip
    """State and settings; a sharded optimizer's are different on every rank by design."""
    if optimizer is None or type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        return []
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    pieces = []
    for number, settings in enumerate(optimizer.param_groups):
        pieces += [
            Piece(f"{key} of parameter group {number}", "setting", value)
            for key, value in sorted(settings.items())
            if key != "params"
        ]
        for index, parameter in enumerate(settings["params"]):
            name = names.get(id(parameter), f"parameter {index} of group {number}")
            state = optimizer.state.get(parameter, {})
            pieces += [Piece(f"{k} of {name}", "optimizer state", v) for k, v in state.items()]
    return pieces


def _refuse_phantoms(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        raw = getattr(piece.value, "raw", piece.value)
        if isinstance(raw, torch.Tensor) and raw.is_meta:
            raise ValueError(
                f"{piece.name} has a shape but no values (a phantom GPU or a meta tensor), so "
                'there is nothing to compare: use compute="real".'
            )


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _gather(value: Any, group: Any) -> list[Any]:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _first_difference(pieces: Sequence[Piece], group: Any) -> str | None:
    """In words; None where there is none.  The same on all ranks."""
    mine = [(piece.label, piece.digest()) for piece in pieces]
    if len(set(_gather(zlib.crc32(repr(mine).encode()), group))) == 1:
        return None
    lists = _gather(mine, group)
    shortest = min(map(len, lists))
    places = [i for i in range(shortest) if len({entries[i] for entries in lists}) > 1]
    if not places:
        counts = ", ".join(f"{len(entries)} on rank {r}" for r, entries in enumerate(lists))
        return f"The ranks do not hold the same number of tensors: {counts}."
    first = places[0]
    return _describe(pieces[first], [entries[first] for entries in lists], len(places), group)


def _describe(piece: Piece, entries: list[tuple[str, int]], count: int, group: Any) -> str:
    usual, _ = Counter(entries).most_common(1)[0]  # of equally many, that of the lowest rank
    differ = [rank for rank, entry in enumerate(entries) if entry != usual]
    like = [rank for rank, entry in enumerate(entries) if entry == usual]
    if len({label for label, _ in entries}) > 1:
        others = "; ".join(f"rank {rank} has {entries[rank][0]}" for rank in differ)
        return f"{_lower(like)} {_have(like)} {usual[0]}, but {others}."
    total = f"; {count} differ in all" if count > 1 else ""
    return (
        f"{piece.label} differs on {_lower(differ)} from {_lower(like)}, "
        f"{_amount(piece, like[0], group)}{total}."
    )


def _lower(ranks: list[int]) -> str:
    return name_ranks(ranks).lower()


def _have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _amount(piece: Piece, source: int, group: Any) -> str:
    """By how much the tensor differs from that of rank ``source`` of the group."""
    box = [piece.value.detach().cpu() if dist.get_rank(group) == source else None]
    dist.broadcast_object_list(box, group=group, group_src=source)
    theirs, mine = (t.double() for t in (box[0], piece.value.detach().cpu()))  # type: ignore[union-attr]
    gap = (theirs - mine).abs().nan_to_num(nan=float("inf"))
    different = (theirs != mine).sum().item()
    largest, most = map(max, zip(*_gather((gap.max().item(), different), group)))
    if not most:
        return "in bits only: by the sign of zeros (0.0 and -0.0)"
    return f"by up to {largest:.2g} in {most} of {mine.numel()} elements"


def _about_buffers(module: nn.Module, buffers: Sequence[Piece], group: Any) -> str:
    """The rest of the sentence."""
    if not buffers:
        return "."
    found = _first_difference(buffers, group)
    if found is None:
        return f", and {len(buffers)} buffers."
    found = found.rstrip(".")
    if getattr(module, "broadcast_buffers", False):
        return (
            f".  Of the buffers, {found}: that is normal between two passes, since DDP copies "
            "rank 0's before the next one; evaluate and save with rank 0's."
        )
    return (
        f".  Of the buffers, {found}, and nothing here makes them equal again: broadcast them from "
        "one rank before you evaluate or save."
    )
