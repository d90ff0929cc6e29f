"""Writes regular expressions as GBNF, since the library's own reader misinterprets some.

Python's `re` parses the pattern; what isn't regular is rejected by name, and the rest is written
with groups, alternatives, repetitions, and classes as ranges of characters.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from re import _constants, _parser
from typing import Any

Ranges = list[tuple[int, int]]  # of code points, first and last

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # not in UTF-8
MAX_REPEATED = 2**31 - 1  # the library counts in 32 bits
CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": [(0x30, 0x39)],
    "CATEGORY_SPACE": [(0x09, 0x0D), (0x20, 0x20)],
    "CATEGORY_WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
}
IRREGULAR = {
    "ASSERT": "a lookaround",
    "ASSERT_NOT": "a lookaround",
    "ATOMIC_GROUP": "an atomic group",
    "AT": "an anchor or word boundary within the expression",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a condition on a group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


def gbnf(pattern: str, never: Ranges | None = None) -> str:
    """Return a pattern of Python's, with the flag ASCII, as an expression of GBNF.

    `never`: characters that no class has. Raises `ValueError` for what is invalid or irregular.
    """
    try:
        parsed = _parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError) as error:
        raise ValueError(f"invalid regular expression: {error}") from None
    writer = _Writer(tuple(never or ()))
    return writer.sequence(_without_anchors(parsed), parsed.state.flags)


def character_class(ranges: Iterable[tuple[int, int]]) -> str:
    """Return a class of GBNF with these characters."""
    spelled = (f"{_escaped(first)}-{_escaped(last)}" for first, last in ranges)
    return f"[{''.join(spelled)}]"


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all characters of UTF-8 that aren't in the ranges, in order."""
    found: Ranges = []
    start = 0
    for first, last in sorted([*ranges, SURROGATES]):
        if first > start:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return [*found, (start, LAST)] if start <= LAST else found


def _without_anchors(parsed: Iterable[Any]) -> list[Any]:
    """Remove the anchors at both ends: the whole answer is matched anyway."""
    items = list(parsed)
    while items and items[0][1] in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
        del items[0]
    while items and items[-1][1] in (_constants.AT_END, _constants.AT_END_STRING):
        del items[-1]
    return items


@dataclass(frozen=True)
class _Writer:
    never: tuple[tuple[int, int], ...]

    def sequence(self, items: Iterable[Any], flags: int) -> str:
        """Return items one after the other; `flags` are those in effect there."""
        return " ".join(self.item(str(name), value, flags) for name, value in items) or '""'

    def item(self, name: str, value: Any, flags: int) -> str:
        write = getattr(self, f"write_{name.lower()}", None)
        if write is None:
            what = IRREGULAR.get(name, name.lower())
            raise ValueError(f"{what} can't be followed token by token; write it without")
        return str(write(value, flags))

    def write_literal(self, value: int, flags: int) -> str:
        return self.one_of(_cases([(value, value)], flags))

    def write_not_literal(self, value: int, flags: int) -> str:
        return self.one_of(others(_cases([(value, value)], flags)))

    def write_any(self, _: None, flags: int) -> str:
        return self.one_of(others([] if flags & re.DOTALL else [(0x0A, 0x0A)]))

    def write_in(self, members: list[Any], flags: int) -> str:
        ranges: Ranges = []
        negated = members[0][0] is _constants.NEGATE
        for kind, value in members[negated:]:
            if kind is _constants.CATEGORY:
                category = CATEGORIES[str(value).replace("NOT_", "")]
                ranges += others(category) if "NOT_" in str(value) else category
            else:
                ranges += _cases([value if kind is _constants.RANGE else (value, value)], flags)
        return self.one_of(others(ranges) if negated else ranges)

    def write_branch(self, value: Any, flags: int) -> str:
        return f"({' | '.join(self.sequence(branch, flags) for branch in value[1])})"

    def write_subpattern(self, value: Any, flags: int) -> str:
        _, added, removed, inner = value
        return f"({self.sequence(inner, flags & ~removed | added)})"

    def write_max_repeat(self, value: Any, flags: int) -> str:
        least, most, inner = value
        unlimited = most == _constants.MAXREPEAT
        if max(least, 0 if unlimited else most) > MAX_REPEATED:
            raise ValueError(f"a repetition of more than {MAX_REPEATED}")
        return f"({self.sequence(inner, flags)}){{{least},{'' if unlimited else most}}}"

    write_min_repeat = write_max_repeat

    def one_of(self, ranges: Ranges) -> str:
        allowed = others([*others(ranges), *self.never])
        if not allowed:
            raise ValueError("a class has no character that may be written here")
        return character_class(allowed)


def _cases(ranges: Ranges, flags: int) -> Ranges:
    """Add the other case of ASCII letters if the flags include IGNORECASE."""
    if not flags & re.IGNORECASE:
        return ranges
    added = list(ranges)
    for first, last in ranges:
        for begin, end, other in ((0x41, 0x5A, 0x20), (0x61, 0x7A, -0x20)):
            if max(first, begin) <= min(last, end):
                added.append((max(first, begin) + other, min(last, end) + other))
    return added


def _escaped(character: int) -> str:
    text = chr(character)
    if text.isascii() and text.isalnum():
        return text
    return f"\\u{character:04X}" if character < 0x10000 else text
