"""Tracks an answer through its JSON Schema, to find the maximum length of the current string.

The answer follows the schema, so quotes, brackets, colons and commas suffice. Where a value's
subschemas are ambiguous, or a string is constrained by more than its length, the tracker reports
that it doesn't know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dovetail_grammars.specs import target
from dovetail_grammars.string_tokens import StringMask

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

Schema = Mapping[str, Any]

_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$defs",
        "definitions",
    }
)
_AT_ROOT = frozenset({"$schema", "x-guidance"})
_VALUES = frozenset({"enum", "const"})
_OTHERS_OF_STRINGS = frozenset({"pattern", "format"})
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_OF_NUMBERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_KNOWN = (
    _OF_OBJECTS
    | _OF_ARRAYS
    | _OF_NUMBERS
    | _VALUES
    | _OTHERS_OF_STRINGS
    | {"type", "minLength", "maxLength"}
)
_ANYTHING: Schema = {}
_REMEMBERED = 20_000  # steps cached by a tracker
_MASK = 100  # size of a mask, in steps
_MASKS = 4  # per position; they differ in what may follow the string

_QUOTE = b'"'
_BACKSLASH = b"\\"
_OPEN = b"{["
_CLOSE = b"}]"
_COLON = b":"
_COMMA = b","
_ESCAPED = -1


class _Candidates:
    """Subschemas of which a value matches at least one; unless `known`, it may match others,
    too."""

    def __init__(self, schemas: Iterable[Schema], known: bool) -> None:
        self.schemas = tuple(schemas)
        self.known = known
        self.longest = self._longest()
        # if `longest` is known
        self.least = max(
            (schema.get("minLength", 0) for schema in self.of_type("string")), default=0
        )
        objects = self.of_type("object") if known else []
        self.names = {
            _spelled(name)
            for schema in objects
            for key in ("properties", "required")
            for name in schema.get(key, ())
        }
        # other names are unconstrained, if any are allowed
        self.any_names = known and all(_VALUES.isdisjoint(schema) for schema in objects)
        # by property; None: all others, or an array's items
        self.within: dict[bytes | None, _Candidates] = {}

    def of_type(self, name: str) -> list[Schema]:
        types = ((schema, schema.get("type", name)) for schema in self.schemas)
        return [
            schema
            for schema, allowed in types
            if name in ([allowed] if isinstance(allowed, str) else allowed)
        ]

    def _longest(self) -> float | None:
        """Return the maximum length of a string, if nothing but `minLength` constrains it
        otherwise."""
        strings = self.of_type("string")
        lengths = {schema.get("maxLength", math.inf) for schema in strings}
        otherwise = _VALUES | _OTHERS_OF_STRINGS
        only_by_length = all(otherwise.isdisjoint(schema) for schema in strings)
        if not (self.known and only_by_length and len(lengths) == 1):
            return None
        [longest] = lengths
        return longest if longest == math.inf or type(longest) is int else None


_UNKNOWN = _Candidates((), known=False)


@dataclass(eq=False, slots=True)
class _Container:
    """Array or object that encloses the current position."""

    is_object: bool
    follows: _Candidates
    outer: _Container | None


@dataclass(eq=False, slots=True)
class Position:
    """Position in an answer, without the current length of its string."""

    container: _Container | None
    follows: _Candidates  # of the current string, otherwise of the next value
    in_string: bool
    is_key: bool  # the current string, or the next one
    key: bytes | None  # as far as it has been written; None: not in the schema
    unfinished: int  # remaining bytes of an incomplete character; or _ESCAPED
    # by token, or by the bytes from where it ends the string; computed on demand
    steps: dict[int | bytes, Step] = field(default_factory=dict)
    masks: list[StringMask] = field(default_factory=list)  # seen so far, latest first
    # tokens of whole characters without quotes or backslashes lead back to it
    stays: bool = field(init=False)
    longest: float | None = field(init=False)
    """Maximum number of characters of this string: `inf` if unlimited. None outside of strings,
    within a character or an escape, if unknown, and if more than its length constrains the string,
    such as a key that may become one of the schema's."""
    # minimum number of characters of this string, if `longest` is known
    least: int = field(init=False)
    within: bool = field(init=False)  # in an open container or string, so that the answer can't end

    def __post_init__(self) -> None:
        whole = self.in_string and not self.unfinished
        self.stays = whole and not (self.is_key and self.key is not None)
        self.longest = self._longest() if whole else None
        self.least = self.follows.least
        self.within = self.in_string or self.container is not None

    def _longest(self) -> float | None:
        if not self.is_key:
            return self.follows.longest
        is_free = (
            self.key is None and self.container is not None and self.container.follows.any_names
        )
        return math.inf if is_free else None


class Step(NamedTuple):
    """Effect of a token: it leads `to` a position, and adds `characters` to the string there.

    `begins`: that string begins in the token.
    """

    to: Position
    characters: int
    begins: bool


@dataclass(slots=True)
class _Walk:
    """A position that changes with each byte of a token.

    The first fields are those of `Position`.
    """

    tracker: Tracker
    container: _Container | None
    follows: _Candidates
    in_string: bool
    is_key: bool
    key: bytes | None
    unfinished: int
    characters: int = 0  # that the token adds to the string where it ends
    begins: bool = False  # that string begins in the token

    def step(self) -> Step:
        """Return what the bytes so far have led to."""
        to = self.tracker.position(
            self.container, self.follows, self.in_string, self.is_key, self.key, self.unfinished
        )
        return Step(to, self.characters, self.begins)

    def follow(self, byte: bytes) -> None:
        if not self.in_string:
            self._follow_between(byte)
        elif byte == _QUOTE and not self.unfinished:
            self._close_string()
        else:
            self._follow_within(byte)

    def _follow_between(self, byte: bytes) -> None:
        """Follow a byte outside of strings."""
        container = self.container
        if byte == _QUOTE:
            self._open_string()
        elif byte in _OPEN:
            self.container = self.tracker.container(byte == b"{", self.follows, container)
            self._expect_member(self.container, self.follows)
        elif container is None:
            return
        elif byte in _CLOSE:
            self.container = container.outer
            self.follows = _UNKNOWN
            self.is_key = False
        elif byte == _COLON:
            self.follows = self.tracker.property(container.follows, self.key)
            self.is_key = False
        elif byte == _COMMA:
            self._expect_member(container, container.follows)

    def _expect_member(self, container: _Container, of: _Candidates) -> None:
        self.is_key = container.is_object
        self.follows = _UNKNOWN if self.is_key else self.tracker.items(of)

    def _open_string(self) -> None:
        self.in_string = True
        self.begins = True
        self.characters = 0
        self.key = b""
        if self.is_key and self.container is not None:
            of = self.container.follows
            if of.any_names and not of.names:
                self.key = None

    def _close_string(self) -> None:
        self.in_string = False
        self.begins = False
        self.characters = 0
        if not self.is_key:
            self.follows = _UNKNOWN
            self.key = b""

    def _follow_within(self, byte: bytes) -> None:
        """Follow a byte of a string's content."""
        if self.unfinished == _ESCAPED:
            self.unfinished = 0
        elif self.unfinished:
            self.unfinished -= 1
        else:
            self.characters += 1
            further = (byte >= b"\xc0") + (byte >= b"\xe0") + (byte >= b"\xf0")
            self.unfinished = _ESCAPED if byte == _BACKSLASH else further
        if self.is_key and self.key is not None and self.container is not None:
            key = self.key + byte
            names = self.container.follows.names
            self.key = key if any(name.startswith(key) for name in names) else None


class Tracker:
    """Positions in answers to one schema, with a cache of steps."""

    def __init__(self, schema: Schema) -> None:
        self._root = schema
        self._candidates: dict[tuple[int, ...], _Candidates] = {}
        self._containers: dict[tuple[Any, ...], _Container] = {}
        self._positions: dict[tuple[Any, ...], Position] = {}
        self._remembered = 0
        self.start = Position(None, self._of([schema]), False, False, b"", 0)

    def step(self, position: Position, token: int, text: bytes) -> Step:
        """Return the effect of `token` with bytes `text` at a position where it is allowed."""
        key: int | bytes = token
        if position.stays:
            # only what follows the string counts, and that of few tokens differs
            end = text.find(_QUOTE)
            if end >= 0 and _BACKSLASH not in text[:end]:
                key = text = text[end:]
        step = position.steps.get(key)
        if step is None:
            step = self._go(position, text)
            self._remember(1)
            position.steps[key] = step
        return step

    def mask(self, position: Position, rest: UInt32) -> StringMask:
        """Return `rest` as a mask of the strings at a position; equal masks are the same object
        while cached."""
        words = rest.tobytes()
        for mask in position.masks:
            if mask.words == words:
                return mask
        mask = StringMask(np.frombuffer(words, np.uint32), words)
        self._remember(_MASK)
        position.masks = [mask, *position.masks[: _MASKS - 1]]
        return mask

    def _remember(self, size: int) -> None:
        """Make room in the cache for `size` steps: clear it if it is full."""
        if self._remembered + size > _REMEMBERED:
            for position in (self.start, *self._positions.values()):
                position.steps.clear()
                position.masks.clear()
            self._positions.clear()
            self._containers.clear()
            self._remembered = 0
        self._remembered += size

    def _go(self, at: Position, text: bytes) -> Step:
        walk = _Walk(self, at.container, at.follows, at.in_string, at.is_key, at.key, at.unfinished)
        for n in range(len(text)):
            walk.follow(text[n : n + 1])
        return walk.step()

    def container(self, *of: Any) -> _Container:
        if of not in self._containers:
            self._containers[of] = _Container(*of)
        return self._containers[of]

    def position(self, container: _Container | None, follows: _Candidates, *rest: Any) -> Position:
        at = container, follows, *rest
        if at not in self._positions:
            self._positions[at] = Position(*at)
        return self._positions[at]

    def property(self, of: _Candidates, key: bytes | None) -> _Candidates:
        name = key if key in of.names else None
        if name not in of.within:
            parts = []
            for schema in of.of_type("object"):
                named = {
                    _spelled(each): part for each, part in schema.get("properties", {}).items()
                }
                parts.append(
                    named[name] if name in named else schema.get("additionalProperties", True)
                )
            of.within[name] = self._parts(of, "object", parts)
        return of.within[name]

    def items(self, of: _Candidates) -> _Candidates:
        if _ITEMS not in of.within:
            arrays = of.of_type("array")
            parts = [
                part
                for schema in arrays
                for part in (*schema.get("prefixItems", ()), schema.get("items", True))
            ]
            of.within[_ITEMS] = self._parts(of, "array", parts)
        return of.within[_ITEMS]

    def _parts(self, of: _Candidates, kind: str, parts: Iterable[Any]) -> _Candidates:
        """Return the subschemas of an array's or object's members, which sibling keywords may
        constrain further."""
        fixed = not all(_VALUES.isdisjoint(schema) for schema in of.of_type(kind))
        return self._of(parts) if of.known and not fixed else _UNKNOWN

    def _of(self, parts: Iterable[Any]) -> _Candidates:
        schemas: dict[int, Schema] = {}
        if not all(self._add(part, schemas, frozenset()) for part in parts):
            return _UNKNOWN
        key = tuple(sorted(schemas))
        if key not in self._candidates:
            self._candidates[key] = _Candidates(schemas.values(), known=True)
        return self._candidates[key]

    def _add(self, part: Any, schemas: dict[int, Schema], references: frozenset[str]) -> bool:
        """Add a schema with references and alternatives resolved.

        Return False if it has unsupported keywords.
        """
        if part is False:
            return True
        if part is True:
            part = _ANYTHING
        if not isinstance(part, dict):
            return False
        keywords = part.keys() - _ANNOTATIONS - (_AT_ROOT if part is self._root else frozenset())
        if keywords == {"$ref"}:
            reference = part["$ref"]
            return reference in references or self._add(
                target(self._root, reference), schemas, references | {reference}
            )
        for either in ("anyOf", "oneOf"):
            if keywords == {either}:
                return all(
                    self._add(alternative, schemas, references) for alternative in part[either]
                )
        schemas[id(part)] = part
        return keywords <= _KNOWN


_ITEMS = b'"'  # no key has this spelling


def _spelled(name: str) -> bytes:
    """Return a key as it is written between its quotes: with the shortest escapes, the only ones
    that the library allows."""
    return json.dumps(name, ensure_ascii=False)[1:-1].encode(errors="surrogatepass")
