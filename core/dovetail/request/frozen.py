"""Immutable values: `FrozenDict`; `frozen`, which makes a read-only copy of plain values, and
`thawed`, the inverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from dovetail.base.checks import as_number, plain_integer
from dovetail.errors import shown

K = TypeVar("K")
V = TypeVar("V")

MAX_DEPTH = 32  # nested containers; Python's stack is limited


class FrozenDict(dict[K, V]):
    """Immutable dict: hashable whatever its values are, copyable and picklable; equal dicts have
    equal hashes."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("this mapping was checked and can't be changed any more: make a new one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def frozen(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Return a read-only copy of a plain value: None, a boolean, a number, text or bytes, or a
    mapping, list, tuple or set of such values.

    Raises `ValueError` for any other value, since other processes get these, and if containers are
    nested deeper than `levels`.
    """
    if isinstance(value, Mapping | list | tuple | set | frozenset) and levels == 0:
        raise ValueError(f"more than {MAX_DEPTH} containers within each other")
    if isinstance(value, Mapping):
        return FrozenDict(
            {frozen(key, levels - 1): frozen(inner, levels - 1) for key, inner in value.items()}
        )
    if isinstance(value, set | frozenset):
        return frozenset(frozen(inner, levels - 1) for inner in value)
    if isinstance(value, list | tuple):
        return tuple(frozen(inner, levels - 1) for inner in value)
    if value is None or isinstance(value, bool | bytes | str):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, float):
        return float(value)  # not one of numpy's
    number = plain_integer(value)
    plain = as_number(value) if number is None else number
    if plain is None:
        raise ValueError(f"expected a plain value, as JSON has them, got {shown(value)}")
    return plain


def thawed(value: Any) -> Any:
    """Return a copy of a frozen value with dicts and lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: thawed(inner) for key, inner in value.items()}
    return [thawed(inner) for inner in value] if isinstance(value, tuple) else value
