"""`Settable`: parameters whose fields may be set, as those of other engines may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self


class Settable:
    """Lets the fields of a frozen dataclass be set. An engine takes a copy of them.

    A value is checked, and converted, as when the object is made; setting an invalid one changes
    nothing.
    """

    __slots__ = ()
    __match_args__: tuple[str, ...]
    __hash__ = None  # type: ignore[assignment]  # it may change

    def __setattr__(self, name: str, value: Any) -> None:
        changed = replace(self, **{name: value})  # type: ignore[type-var]
        for field in self.__match_args__:
            object.__setattr__(self, field, getattr(changed, field))

    def clone(self) -> Self:
        """Return a copy."""
        return replace(self)  # type: ignore[type-var]
