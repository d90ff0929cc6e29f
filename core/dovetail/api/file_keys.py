"""Tables of what each key of a model's small files does: `FileKeys`. Readers check files by them.

A key is used, has no effect for a stated reason, or is refused by name unless its value changes
nothing. `FileKeys.unknown` says what becomes of a key that isn't in the table: "refused" unless it
is off (null, false, 0, empty), "logged" where the library that defines the file ignores unknown
keys, or "left" to that library where it reads the file. The documentation shows the tables, and
tests compare them with the classes of the libraries that write the files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from dovetail.base.checks import among
from dovetail.errors import UnsupportedError, shown

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class Used:
    """A key whose value is honoured. `how`: what it sets."""

    how: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A key that changes nothing here, whatever its value. `why`: the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A key that isn't implemented. `what`: what it would do; `unless`: values besides null that
    change nothing."""

    what: str
    unless: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Return True if a value changes nothing."""
        return value is None or among(value, self.unless)


KeyRule = Used | NoEffect | Refused


@dataclass(frozen=True, slots=True)
class FileKeys:
    """Table of the keys of one kind of file. `file`: its name, or that of an object in it; `keys`:
    names, or patterns as in `fnmatch`."""

    file: str
    keys: Mapping[str, KeyRule]
    unknown: Literal["refused", "logged", "left"] = "refused"

    def rule(self, key: str) -> KeyRule | None:
        """Return the rule for a key; None for one that isn't in the table."""
        if key in self.keys:
            return self.keys[key]
        patterns = (pattern for pattern in self.keys if "*" in pattern)
        return next((self.keys[one] for one in patterns if fnmatchcase(key, one)), None)

    def reasons_against(self, content: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each key that can't be honoured."""
        reasons = []
        for key, value in content.items():
            rule = self.rule(key)
            if isinstance(rule, Refused) and not rule.allows(value):
                values = f" (only {', '.join(map(shown, rule.unless))})" if rule.unless else ""
                reasons.append(f"{key} = {shown(value)} is not implemented{values}: {rule.what}")
            elif rule is None and value and self.unknown == "refused":
                reasons.append(
                    f"{shown(key)} = {shown(value)} is unknown and may change the numbers"
                )
        return reasons

    def check(self, content: Mapping[str, Any], where: object, remedy: str = "") -> None:
        """Raise `UnsupportedError` naming each key that can't be honoured; log unknown ones.
        `where`: the file; `remedy`: advice."""
        if reasons := self.reasons_against(content):
            raise UnsupportedError(
                f"{where}: {'; '.join([*reasons, *([remedy] if remedy else [])])}"
            )
        unknown = [key for key in content if content[key] is not None and self.rule(key) is None]
        if unknown and self.unknown != "left":
            log.warning("%s: unknown keys, without effect: %s", where, shown(", ".join(unknown)))
