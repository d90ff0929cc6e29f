"""Rewrites regular expressions for both libraries, whose dialects differ from Python's and silently ignore some features.

A pattern is parsed by Python's own `re`, non-regular features are rejected by name, and the rest is rewritten with groups, alternatives, repetitions
and classes as ranges of characters, which every dialect has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined]  # the one reader of the syntax, in each Python that Dovetail runs on
from typing import Any, NoReturn

from dovetail.api.grammar import GrammarSpec
from dovetail_grammars.specs import refuse

Ranges = list[tuple[int, int]]  # of code points, first and last

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
UNLIMITED = _constants.MAXREPEAT
MAX_REPEATED = 2**31 - 1  # XGrammar counts in 32 bits
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


@dataclass(frozen=True, slots=True)
class Dialect:
    """Target notation of a pattern. Classes, repetitions and escapes (\\u and four digits) are the same in all."""

    group: str  # opening of a group
    quote: str  # around literal text
    space: str  # between the parts of a sequence
    never: Ranges = field(default_factory=list)  # characters to exclude from all classes


RUST = Dialect("(?:", "", "")
EBNF = Dialect("(", '"', " ")
IN_JSON = Dialect(
    "(?:", "", "", never=[(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
)  # within a JSON string, where these must be escaped


def rewritten(spec: GrammarSpec, pattern: str, dialect: Dialect, named: str = "") -> str:
    """Return `pattern`, in Python's syntax with the flag ASCII, in another dialect. Raises `RequestError` if it is invalid or isn't regular. `named`:
    prefix of the error's text."""
    try:
        parsed = _parser.parse(pattern, re.ASCII)
        return _Writer(spec, dialect, named).sequence(_without_anchors(parsed), parsed.state.flags)
    except (re.error, OverflowError) as error:
        refuse(spec, f"{named}invalid regular expression: {error}")
    except RecursionError:
        refuse(spec, f"{named}the regular expression is nested too deeply")


_UNREAD_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f]|\\(?:[0acefv]|x[01]|x7[fF]|[xu]\{|u00[01]|u007[fF])"
)


def demands(pattern: str, characters: Ranges) -> bool:
    """Return True if some position of a pattern allows only these characters. In a syntax that Python can't parse, any control character counts."""
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
    """Writes a parsed pattern in a dialect. `flags`: those in effect at the place, since groups can change them."""

    spec: GrammarSpec
    dialect: Dialect
    named: str

    def sequence(self, items: Iterable[Any], flags: int) -> str:
        parts: list[str] = []
        text = ""  # of consecutive literals
        for name, value in items:
            part = self.item(str(name), value, flags)
            if isinstance(part, int):
                text += _escaped(part)
                continue
            parts += [self.literal(text)] * bool(text) + [part]
            text = ""
        return self.dialect.space.join(parts + [self.literal(text)] * bool(text or not parts))

    def literal(self, text: str) -> str:
        return f"{self.dialect.quote}{text}{self.dialect.quote}"

    def item(self, name: str, value: Any, flags: int) -> str | int:
        """Return the text of an item, or the code point if it is a single character."""
        if name == "LITERAL":
            return self.characters(_cases([(value, value)], flags))
        if name == "NOT_LITERAL":
            return self.characters(_others(_cases([(value, value)], flags)))
        if name == "ANY":
            return self.characters(_others([] if flags & re.DOTALL else [(0x0A, 0x0A)]))
        if name == "IN":
            return self.characters(_members(value, flags))
        if name == "BRANCH":
            return self.group("|".join(self.sequence(branch, flags) for branch in value[1]))
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            return self.group(self.sequence(inner, flags & ~removed | added))
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            if max(least, 0 if most == UNLIMITED else most) > MAX_REPEATED:
                refuse(self.spec, f"{self.named}a repetition of more than {MAX_REPEATED}")
            return self.group(self.sequence(inner, flags)) + _times(least, most)
        return self.refuse(name, value)

    def group(self, text: str) -> str:
        return f"{self.dialect.group}{text})"

    def characters(self, ranges: Ranges) -> str | int:
        """Return a class as text, or the code point if it has a single character."""
        merged = (
            _others([*_others(ranges), *self.dialect.never])
            if self.dialect.never
            else _merged(ranges)
        )
        if not merged:
            unwritten = ", except those that must be escaped in JSON" if self.dialect.never else ""
            refuse(
                self.spec,
                f"{self.named}the regular expression has a class without any character{unwritten}",
            )
        if len(merged) == 1 and merged[0][0] == merged[0][1]:
            return merged[0][0]
        return f"[{''.join(_escaped(first) if first == last else f'{_escaped(first)}-{_escaped(last)}' for first, last in merged)}]"

    def refuse(self, name: str, value: Any) -> NoReturn:
        anchors = {"AT_BOUNDARY": "word boundaries, \\b", "AT_NON_BOUNDARY": "word boundaries, \\B"}
        what = (
            anchors.get(str(value), "anchors within the expression")
            if name == "AT"
            else REFUSED.get(name, name.lower())
        )
        refuse(
            self.spec,
            f"{self.named}{what} can't be followed token by token; write the expression without",
        )


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
