"""Reading TOML tables into dataclasses, with a sentence for everything that can be wrong."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import sys
from pathlib import Path
from typing import Any, TypeVar

from . import ranges

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NOISE = 0.1
"""Share by which a time of a measured curve may lie under the one before it: published ones have
it, too."""

Tables = dict[str, Any]
T = TypeVar("T")


def read(path: Path) -> Tables:
    """The tables of a TOML file; ``ValueError`` if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"There is no profile file {str(path)!r}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"The profile file {path.name} is not readable TOML: {why}.") from None


def table(value: Any, where: str) -> Tables:
    """``value``, which has to be a table."""
    if not isinstance(value, dict):
        raise ValueError(f"In a profile [{where}] must be a table, not {value!r}.")
    return value


def named(tables: Tables, kind: str, name: Any) -> Tables:
    """Entry ``name`` of table ``kind``; ``like`` in it inherits from another entry."""
    if not isinstance(name, str):
        raise ValueError(f"The name of a {kind} must be a text, not {name!r}.")
    if name not in tables[kind]:
        raise ValueError(unknown(kind, name, list(tables[kind])))
    values, seen = dict(table(tables[kind][name], f"{kind}.{name}")), {name}
    while "like" in values:
        parent = values.pop("like")
        if parent not in tables[kind] or parent in seen:
            raise ValueError(f"{kind}.{name} is like {parent!r}, which is not another {kind}.")
        seen.add(parent)
        values = {**table(tables[kind][parent], f"{kind}.{parent}"), **values}
    return {"name": name, **values}


def fill(kind: type[T], values: Tables, where: str) -> T:
    """A dataclass from a table, every entry known and every value possible."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ValueError(unknown(f"entry of [{where}]", key, list(fields)))
    filled: dict[str, Any] = {}
    for key, spec in fields.items():
        missing = dataclasses.MISSING
        if key in values or (spec.default is missing and spec.default_factory is missing):
            filled[key] = _value(str(spec.type), need(values, key, where), f"{where}.{key}")
            ranges.check(key, filled[key], f"{where}.{key}")
    return kind(**filled)


def need(values: Tables, key: str, where: str) -> Any:
    """The entry ``key``, which has to be there."""
    if key not in values:
        raise ValueError(f"[{where}] has no {key!r}.")
    return values[key]


def number(value: Any, where: str) -> float:
    """A positive, finite number."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value < 1e18:
        raise ValueError(f"{where} must be a positive number, not {value!r}.")
    return float(value)


def whole(value: Any, where: str) -> int:
    """A positive integer."""
    if number(value, where) != int(value):
        raise ValueError(f"{where} must be a whole number, not {value!r}.")
    return int(value)


def text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a text, not {value!r}.")
    return value


def unknown(what: str, name: str, known: list[str]) -> str:
    """A sentence that offers the nearest known names, or all if none is near."""
    lower = {k.lower(): k for k in known}
    near = [k for k in known if name and k.lower().startswith(name.lower())]
    near += [lower[k] for k in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
    if near:
        return f"Unknown {what} {name!r}. Did you mean {', '.join(dict.fromkeys(near))}?"
    return f"Unknown {what} {name!r}. Known: {', '.join(known)}."


def _value(kind: str, value: Any, where: str) -> Any:
    """``value`` checked against the annotation ``kind`` of the field that it fills."""
    if kind in _READERS:
        return _READERS[kind](value, where)
    if kind.startswith("dict"):
        entries = table(value, where).items()
        return {_key(key, kind, where): number(v, f"{where}.{key}") for key, v in entries}
    if kind == "tuple[str, ...]":
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list of texts, not {value!r}.")
        return tuple(text(v, where) for v in value)
    return _curve(value, where)


def _key(key: str, kind: str, where: str) -> str | int:
    """A key of a table; numbers of ranks are texts in TOML."""
    if "int" not in kind:
        return key
    if not key.isdecimal() or not int(key):
        raise ValueError(f"{where} goes by whole numbers, 1 or more, so {key!r} cannot be a key.")
    return int(key)


_READERS = {"str": text, "int": whole, "float": number}


def _curve(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    good = isinstance(value, list) and all(isinstance(p, list) and len(p) == 2 for p in value)
    if not good or len(value) < 2:
        raise ValueError(f"{where} must be a list of [bytes, seconds], at least two.")
    points = tuple((whole(b, where), number(s, where)) for b, s in value)
    if any(one >= other for (one, _), (other, _) in itertools.pairwise(points)):
        raise ValueError(f"{where} must be in ascending order of bytes.")
    for (one, slow), (other, fast) in itertools.pairwise(points):
        if fast < (1 - NOISE) * slow:
            raise ValueError(
                f"{where} has {slow:g} s for {one} bytes, but only {fast:g} s for {other}: more "
                "bytes take no less time. Leave out the slower point, or measure it again."
            )
    return points


__all__ = ["Tables", "fill", "named", "need", "number", "read", "table", "text", "unknown", "whole"]
