"""Check that a field of a dataclass is a member of an enum, since Python doesn't."""

from __future__ import annotations

from enum import Enum

from dovetail.errors import PluginError


def require_member(owner: object, field: str, members: type[Enum]) -> None:
    """Raise `PluginError` unless `owner.field` is one of `members`."""
    value = getattr(owner, field)
    if not isinstance(value, members):
        names = ", ".join(str(member) for member in members)
        raise PluginError(f"{type(owner).__name__}: {field} is {value!r}, expected {names}")
