"""From disk to GPU: pictures to load, loaders that can be watched, and what they should be told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["idle_share"]


def __getattr__(name: str) -> Any:
    if name != "idle_share":  # loaded at first use: workers import this package, and start faster
        raise AttributeError(f"module 'labutils.loading' has no attribute {name!r}")
    from labutils.loading.watching import idle_share

    return idle_share


if TYPE_CHECKING:
    from labutils.loading.watching import idle_share
