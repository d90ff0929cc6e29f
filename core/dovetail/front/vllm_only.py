"""`VllmOnly`: an argument or field of vLLM's that has no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.base.checks import among
from dovetail.errors import RequestError


@dataclass(frozen=True, slots=True)
class VllmOnly:
    """An argument or field of vLLM's that can only be left out.

    A value that asks for vLLM's default is accepted, and any other is rejected with what to do
    instead.
    """

    instead: str  # of any other value
    default: tuple[Any, ...] = ()  # values that ask for vLLM's default, besides None
    advisory: bool = False  # no value changes an output: all are accepted

    def accepts(self, value: Any) -> bool:
        """Return True if leaving the value out changes nothing."""
        return value is None or self.advisory or among(value, self.default)


def leave_out(rows: Mapping[str, VllmOnly], named: dict[str, Any]) -> None:
    """Remove vLLM's fields from keyword arguments. Raises `RequestError` for one that asks for
    something."""
    for name in [name for name in named if name in rows]:
        if not rows[name].accepts(named.pop(name)):
            raise RequestError(f"{name}: {rows[name].instead}")
