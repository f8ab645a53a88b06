"""What is known of each ATen operator before it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from labutils.virtual import kernels

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Operators that are more than "run it on the wrapped tensors", by packet, or by namespace for all
of that namespace.  The modules that handle them add them here."""

_DATA = {
    "index": (0,), "_unsafe_index": (0,), "index_put": (0, 2), "index_put_": (0, 2),
    "_index_put_impl_": (0, 2), "_ctc_loss": (0,), "_pack_padded_sequence": (0,),
}  # fmt: skip
"""Arguments that must be on the device, where others (indices, lengths) may lie on the CPU."""
_MAY_ALIAS = {"_unsafe_view", "_reshape_alias", "lift_fresh", "unsafe_split", "unsafe_chunk"}
"""Operators whose result shares its argument's memory though their schema does not say so."""
_SPLITS = {"split", "unbind", "chunk", "split_with_sizes"}
_CHANGES_SHAPE = {
    "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_", "resize_",
    "resize_as_",
}  # fmt: skip
_NEEDS_VALUES = {
    "nonzero",
    "index",
    "_unsafe_index",
    "masked_select",
    "_unique2",
    "equal",
    "unique_dim",
    "is_nonzero",
}
"""Operators whose result's size depends on values (of an index: if it is a mask): with CUDA the
host waits for them."""


class Operator:
    """One ATen overload."""

    __slots__ = (
        "call",
        "changes_shape",
        "data",
        "func",
        "handler",
        "kind",
        "name",
        "needs_values",
        "outs",
        "returns",
        "written",
    )

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.call: Callable[..., Any] = func._op
        """What ``func(...)`` calls, without Python in between."""
        self.name: str = func.overloadpacket.__name__
        self.handler = HANDLERS.get(func.overloadpacket) or HANDLERS.get(func.namespace)
        self.data = _DATA.get(self.name)
        self.changes_shape = self.name in _CHANGES_SHAPE
        self.needs_values = self.name in _NEEDS_VALUES
        self.written = tuple(
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        )
        self.outs = tuple(a.name for a in schema.arguments if a.is_out)
        self.returns = _returns(self.name, schema)
        self.kind = "view" if self.returns == "view" else kernels.kind_of(self.name)


def _returns(name: str, schema: Any) -> str:
    """How the results relate to the arguments: fresh, view, self, out or none."""
    if any(a.is_out for a in schema.arguments):
        return "out"
    if not schema.returns:
        return "none"
    alias = schema.returns[0].alias_info
    if name in _MAY_ALIAS or (alias is None and name in _SPLITS):
        return "view"
    if alias is None:
        return "fresh"
    if not alias.is_write:
        return "view"
    return "self"


_operators: dict[int, Operator] = {}
"""By the identity of the overload, which is kept alive here; its own hash is a call of Python."""


def operator_of(func: OpOverload) -> Operator:
    """The :class:`Operator` of ``func``, made at its first use."""
    operator = _operators.get(id(func))
    if operator is None:
        operator = _operators[id(func)] = Operator(func)
    return operator
