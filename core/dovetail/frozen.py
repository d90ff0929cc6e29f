"""Values that can't be changed after they were checked: `FrozenDict`, and `frozen`, which makes nested containers from outside read-only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_DEPTH = 32  # nested containers: nobody needs more, and Python's stack is limited


class FrozenDict(dict[K, V]):
    """A dict that can't be changed. It can be hashed, whatever its values are, copied and pickled; equal dicts have equal hashes."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("this mapping was checked and can't be changed any more: make a new one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def frozen(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Return a read-only copy of a mapping, list, set or byte array, and of those nested inside; any other value is returned as it is.

    Raises `ValueError` if containers are nested deeper than `levels`.
    """
    if not isinstance(value, Mapping | list | tuple | set | frozenset | bytearray):
        return value
    if levels == 0:
        raise ValueError(f"more than {MAX_DEPTH} containers within each other")
    if isinstance(value, Mapping):
        return FrozenDict({key: frozen(inner, levels - 1) for key, inner in value.items()})
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, list) or type(value) is tuple:
        return tuple(frozen(inner, levels - 1) for inner in value)
    return value  # a named tuple: its class says more than its items
