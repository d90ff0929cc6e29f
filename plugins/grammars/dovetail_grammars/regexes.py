"""Rewrites regular expressions for the library, whose dialect differs from Python's and silently
ignores some features.

A pattern is parsed by Python's own `re`, non-regular features are rejected by name, and the rest is
rewritten with groups, alternatives, repetitions and classes as ranges of characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# the one reader of the syntax, in each Python that Dovetail runs on
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any, NoReturn

from dovetail.api.grammar import GrammarSpec
from dovetail_grammars.specs import refuse

Ranges = list[tuple[int, int]]  # of code points, first and last

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
UNLIMITED = _constants.MAXREPEAT
MAX_REPEATED = 2**31 - 1  # the library counts in 32 bits
CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": [(0x30, 0x39)],
    "CATEGORY_SPACE": [(0x09, 0x0D), (0x20, 0x20)],
    "CATEGORY_WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
}
REFUSED = {
    "ASSERT": "lookarounds, like (?=...)",
    "ASSERT_NOT": "lookarounds, like (?!...)",
    "ATOMIC_GROUP": "atomic groups, (?>...)",
    "GROUPREF": "backreferences",
    "GROUPREF_EXISTS": "conditions on groups, (?(1)...)",
    "POSSESSIVE_REPEAT": "possessive repetitions, like a++",
}


def rewritten(spec: GrammarSpec) -> str:
    """Return a spec's pattern, in Python's syntax with the flag ASCII, for the library. Raises
    `RequestError` if it is invalid or isn't regular."""
    try:
        parsed = _parser.parse(spec.text, re.ASCII)
        return _Writer(spec).sequence(_without_anchors(parsed), parsed.state.flags)
    except (re.error, OverflowError) as error:
        refuse(spec, f"invalid regular expression: {error}")
    except RecursionError:
        refuse(spec, "the regular expression is nested too deeply")


_UNREAD_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f]|\\(?:[0acefv]|x[01]|x7[fF]|[xu]\{|u00[01]|u007[fF])"
)


def demands(pattern: str, characters: Ranges) -> bool:
    """Return True if some position of a pattern allows only these characters.

    In a syntax that Python can't parse, any control character counts.
    """
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError):
        return _UNREAD_CONTROLS.search(pattern) is not None
    rest = list(parsed)
    while rest:
        name, value = rest.pop()
        if str(name) in ("LITERAL", "IN"):
            these = [(value, value)] if str(name) == "LITERAL" else _members(value, 0)
            if not _others([*_others(these), *characters]):
                return True
        elif isinstance(value, tuple | list):
            rest += [item for part in _flat(value) for item in part]
    return False


def _flat(value: Any) -> Iterable[Any]:
    """Yield the sequences nested in an item of a parsed pattern."""
    for part in value:
        if isinstance(part, _parser.SubPattern):
            yield part
        elif isinstance(part, tuple | list):
            yield from _flat(part)


def _without_anchors(parsed: Iterable[Any]) -> list[Any]:
    """Remove the anchors at both ends: the whole answer is matched anyway."""
    items = [(str(name), value) for name, value in parsed]
    while (
        items
        and items[0][0] == "AT"
        and str(items[0][1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING")
    ):
        del items[0]
    while items and items[-1][0] == "AT" and str(items[-1][1]) in ("AT_END", "AT_END_STRING"):
        del items[-1]
    return items


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes a parsed pattern.

    `flags`: those in effect at the place, since groups can change them.
    """

    spec: GrammarSpec

    def sequence(self, items: Iterable[Any], flags: int) -> str:
        return "".join(self.item(str(name), value, flags) for name, value in items)

    def item(self, name: str, value: Any, flags: int) -> str:
        """Return the text of an item that `re` has parsed."""
        match name:
            case "LITERAL":
                return self.characters(_cases([(value, value)], flags))
            case "NOT_LITERAL":
                return self.characters(_others(_cases([(value, value)], flags)))
            case "ANY":
                return self.characters(_others([] if flags & re.DOTALL else [(0x0A, 0x0A)]))
            case "IN":
                return self.characters(_members(value, flags))
            case "BRANCH":
                return _group("|".join(self.sequence(branch, flags) for branch in value[1]))
            case "SUBPATTERN":
                _, added, removed, inner = value
                return _group(self.sequence(inner, flags & ~removed | added))
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                if max(least, 0 if most == UNLIMITED else most) > MAX_REPEATED:
                    refuse(self.spec, f"a repetition of more than {MAX_REPEATED}")
                return _group(self.sequence(inner, flags)) + _times(least, most)
            case _:
                return self.refuse(name, value)

    def characters(self, ranges: Ranges) -> str:
        merged = _merged(ranges)
        if not merged:
            refuse(self.spec, "the regular expression has a class without any character")
        if len(merged) == 1 and merged[0][0] == merged[0][1]:
            return _escaped(merged[0][0])
        return f"[{''.join(map(_range, merged))}]"

    def refuse(self, name: str, value: Any) -> NoReturn:
        anchors = {"AT_BOUNDARY": "word boundaries, \\b", "AT_NON_BOUNDARY": "word boundaries, \\B"}
        what = REFUSED.get(name, name.lower())
        if name == "AT":
            what = anchors.get(str(value), "anchors within the expression")
        refuse(self.spec, f"{what} can't be followed token by token; write the expression without")


def _group(text: str) -> str:
    return f"(?:{text})"


def _range(characters: tuple[int, int]) -> str:
    first, last = characters
    return _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"


def _members(members: Sequence[Any], flags: int) -> Ranges:
    """Return the characters of a class in brackets."""
    ranges: Ranges = []
    negated = str(members[0][0]) == "NEGATE"
    for name, value in members[negated:]:
        if str(name) == "CATEGORY":
            positive = CATEGORIES[str(value).replace("NOT_", "")]
            ranges += _others(positive) if "NOT_" in str(value) else positive
        else:
            ranges += _cases([value if str(name) == "RANGE" else (value, value)], flags)
    return _others(ranges) if negated else ranges


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


def _others(ranges: Ranges) -> Ranges:
    """Return all characters that aren't in the ranges."""
    others: Ranges = []
    start = 0
    for first, last in _merged([*ranges, SURROGATES]):
        if first > start:
            others.append((start, first - 1))
        start = last + 1
    return [*others, (start, LAST)] if start <= LAST else others


def _merged(ranges: Ranges) -> Ranges:
    """Return the ranges in order, without overlaps."""
    merged: Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _times(least: int, most: int) -> str:
    if most == UNLIMITED:
        return f"{{{least},}}" if least > 1 else "+" if least else "*"
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _escaped(character: int) -> str:
    text = chr(character)
    if text.isascii() and text.isalnum():
        return text
    return f"\\u{character:04X}" if character < 0x10000 else text
