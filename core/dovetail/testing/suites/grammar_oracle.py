"""Oracle of `GrammarSuite`: a small vocabulary, and languages with texts known without a grammar
library.

A token is allowed if some text of the language begins with the current text plus the token's bytes.
Languages are lists of texts, filtered by Python's `re` for regular expressions, so that the oracle
shares no code or method with backends.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from typing import Any

from dovetail.api.grammar import GrammarContext, GrammarSpec, SpecKind

PRINTABLE = [bytes([byte]) for byte in range(0x20, 0x7F)] + [b"\n", b"\t"]
# bytes of multi-byte characters
PARTS = [bytes([byte]) for byte in sorted(set("éÉä€😀\u0301".encode()))]
PIECES = [
    *(
        b"ab",
        b"abc",
        b"bc",
        b"bd",
        b"aa",
        b"cd",
        b"  ",
        b'{"',
        b'":',
        b'"a":',
        b"},",
        b"true",
        b"<f",
        b"<fg>2;",
        b"1</f",
        b"f>1",
        b"\n\t",
    ),
    *("é".encode(), "€x".encode(), b"\xa9x", b"\x82\xac", b"x\xc3"),
]
TWICE = [b"a", b"ab", "é".encode()]  # texts with a second id
STOP_TEXTS = [None, b"</f>", b"a"]  # bytes of the stop ids, which still aren't text


def vocabulary(*, stops: int = 3, padding: int = 3, without: bytes | None = None) -> GrammarContext:
    """Return a vocabulary with tokens that are never text: two empty ones, some without bytes, and
    the stop ids. Otherwise all vocabularies are the same, except for the token `without`."""
    tokens: list[bytes | None] = [None, *PRINTABLE, b"", *PARTS, *PIECES, *TWICE, b""]
    tokens = [None if text == without else text for text in tokens]
    first = len(tokens)
    tokens += STOP_TEXTS[:stops] + [None] * padding
    return GrammarContext(tokens, frozenset(range(first, first + stops)), len(tokens))


CONTEXT = vocabulary()


def text_of(token: int) -> bytes:
    """Return a token's bytes; none if it is never text."""
    return b"" if token in CONTEXT.stop_ids else CONTEXT.token_bytes[token] or b""


def ids_of(text: str | bytes) -> list[int]:
    """Return the text as tokens of one byte each."""
    data = text.encode() if isinstance(text, str) else text
    return [CONTEXT.token_bytes.index(bytes([byte])) for byte in data]


class Language(ABC):
    """A set of texts. `open`: ids that may be allowed or not."""

    open: frozenset[int] = frozenset()

    @abstractmethod
    def has(self, text: bytes) -> bool: ...

    @abstractmethod
    def begins(self, text: bytes) -> bool:
        """Return True if some text of the language begins with this one."""

    def knows(self, text: bytes) -> bool:
        """Return True if `allowed` is known for this text."""
        return True

    def examples(self) -> Sequence[bytes]:
        """Return beginnings of texts to which few ways at random lead."""
        return ()

    def allowed(self, text: bytes) -> set[int]:
        """Return the ids allowed after `text`."""
        ids = {
            id
            for id in range(CONTEXT.vocab_size)
            if text_of(id) and self.begins(text + text_of(id))
        }
        return ids | CONTEXT.stop_ids if self.has(text) else ids


class Listed(Language):
    """Language given by its texts: all, or enough to know all prefixes of up to `known_to` bytes.
    They are enumerated when first needed, which takes up to a second."""

    def __init__(self, texts: Iterable[str], known_to: int | None = None) -> None:
        self._given = texts
        self.known_to = known_to

    @cached_property
    def texts(self) -> set[bytes]:
        return {text.encode() for text in self._given}

    @cached_property
    def beginnings(self) -> set[bytes]:
        return {text[:end] for text in self.texts for end in range(len(text) + 1)}

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token that consists of the texts' bytes."""
        letters = set().union(*self.texts)
        return max(
            len(text_of(id)) for id in range(CONTEXT.vocab_size) if letters.issuperset(text_of(id))
        )

    def has(self, text: bytes) -> bool:
        return text in self.texts

    def begins(self, text: bytes) -> bool:
        return text in self.beginnings

    def knows(self, text: bytes) -> bool:
        return self.known_to is None or len(text) + self.longest <= self.known_to


class Tagged(Language):
    """Structures, each one of `bodies`: at triggers in free text, or only structures joined by
    `separator`. ASCII only: it is unspecified whether other bytes are allowed."""

    open = frozenset(id for id in range(CONTEXT.vocab_size) if not text_of(id).isascii())

    def __init__(
        self,
        trigger: str,
        bodies: Iterable[str],
        *,
        at_least_one: bool,
        stop_after_first: bool,
        separator: str | None,
    ) -> None:
        self.trigger, self.bodies = trigger.encode(), [body.encode() for body in bodies]
        self.at_least_one = at_least_one
        self.stop_after_first = stop_after_first
        self.separator = None if separator is None else separator.encode()

    def examples(self) -> Sequence[bytes]:
        """Return those of texts with two structures."""
        between = {b"", b"x", self.separator or b""}
        texts = {
            before + one + glue + two
            for before in (b"", b"x")
            for glue in between
            for one, two in permutations(self.bodies, 2)
        }
        return sorted(
            {
                text[:end]
                for text in texts
                for end in range(len(text) + 1)
                if self.begins(text[:end])
            }
        )

    def has(self, text: bytes) -> bool:
        return self._read(text)[0]

    def begins(self, text: bytes) -> bool:
        return text.isascii() and self._read(text)[1]

    def _read(self, text: bytes) -> tuple[bool, bool]:
        """Return whether `text` is a whole answer, and whether it is the beginning of one."""
        if not text and self.separator is not None:
            return not self.at_least_one, True
        first = True
        alone = self.at_least_one or self.separator is not None
        while True:
            if not first and self.stop_after_first:
                return not text, not text
            if not first and self.separator is not None:
                if len(text) < len(self.separator):
                    return not text, self.separator.startswith(text)
                if not text.startswith(self.separator):
                    return False, False
                text = text[len(self.separator) :]
            elif not (first and alone):
                start = text.find(self.trigger)
                if start < 0:
                    return True, True
                text = text[start:]
            body = next((body for body in self.bodies if text.startswith(body)), None)
            if body is None:
                return False, any(body.startswith(text) for body in self.bodies)
            text = text[len(body) :]
            first = False


@dataclass(frozen=True, slots=True)
class Case:
    """A spec and its language."""

    spec: GrammarSpec
    language: Language

    def __str__(self) -> str:
        return f"{self.spec.kind} {self.spec.text!r}"


def _regex(pattern: str, alphabet: str, length: int) -> Case:
    """`alphabet`: all characters that the language has. Each of its beginnings is one character at
    most away from a text, and texts longer than `length` are left out."""
    texts = ("".join(letters) for n in range(length + 1) for letters in product(alphabet, repeat=n))
    return Case(
        GrammarSpec("regex", pattern),
        Listed(filter(re.compile(pattern, re.ASCII).fullmatch, texts), length - 1),
    )


def _choice(*texts: str) -> Case:
    return Case(GrammarSpec("choice", json.dumps(texts)), Listed(texts))


def _nested(grammar: str) -> Case:
    """`grammar` describes equally many "a" and "b" around one "c"."""
    return Case(
        GrammarSpec("grammar", grammar), Listed((f"{'a' * n}c{'b' * n}" for n in range(12)), 11)
    )


def _tags(
    trigger: str,
    *structures: tuple[str, int, str],
    at_least_one: bool = False,
    stop_after_first: bool = False,
    separator: str | None = None,
) -> Case:
    """Structures of a constant between two texts."""
    spec: dict[str, Any] = {
        "structures": [
            {"begin": begin, "schema": {"const": n}, "end": end} for begin, n, end in structures
        ],
        "triggers": [trigger],
    }
    spec |= {"at_least_one": True} if at_least_one else {}
    spec |= {"stop_after_first": True} if stop_after_first else {}
    spec |= {} if separator is None else {"separator": separator}
    bodies = [f"{begin}{n}{end}" for begin, n, end in structures]
    language = Tagged(
        trigger,
        bodies,
        at_least_one=at_least_one,
        stop_after_first=stop_after_first,
        separator=separator,
    )
    return Case(GrammarSpec("structural_tag", json.dumps(spec)), language)


WORDS = [chr(code) for code in range(128) if chr(code).isalnum() or code == ord("_")]

CASES = (
    _regex("a(b|bc)*d?", "abcd", 8),
    _regex("^(abc|abd|a|(ab)?(cd)+)$", "abcd", 8),
    _regex("(?P<zeros>x*[0-2]){0,2}", "x012", 8),
    _regex("(?i:ab)+|(?:c-)*?", "aAbBcC-", 6),
    _regex("(é|ä|[€x])*x?", "éä€x", 7),
    Case(
        GrammarSpec("regex", r"\d-\w"),
        Listed(f"{digit}-{word}" for digit in range(10) for word in WORDS),
    ),
    _choice("a", "ab", "abc", "b", "bd", "abcx", "b.", "c*"),
    _choice("true", "tr\n\t", '"a":', "\\", "{}", "", "é", "€x", "x😀", "e\u0301", "x</f>"),
    _tags("<f", ("<f>", 1, "</f>"), ("<fg>", 2, ";")),
)
# of the same language; a backend reads one at least. The first rule isn't always where it starts
SYNTAXES: Mapping[str, tuple[Case, ...]] = {
    "Lark": (
        _nested('start: "a" start "b" | "c"'),
        _nested('pair: "a" start "b"\nstart: pair | "c"'),
    ),
    "GBNF": (
        _nested('root ::= "a" root "b" | "c"'),
        _nested('pair ::= "a" root "b"\nroot ::= pair | "c"'),
    ),
}
_TWO = (("<f>", 1, "</f>"), ("<f>", 2, ";"))
TAGS = (  # backends may reject some
    _tags("<f", *_TWO),
    _tags("<f", *_TWO, stop_after_first=True),
    _tags("<f", *_TWO, at_least_one=True),
    _tags("<f", *_TWO, at_least_one=True, stop_after_first=True),
    _tags("<f", *_TWO, separator="\n"),
    _tags("<f", *_TWO, at_least_one=True, separator="ab"),
    _tags("<f", *_TWO, stop_after_first=True, separator=" "),
)
CLASSES = (
    *(
        ".",
        r"(?s:.)",
        r"\s",
        r"\S",
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        "[^a-c]",
        "[a-c^-]",
        r"[\]\\a]",
        r"[^\s\w]",
        r"[\d.x-z]",
        "[é-ö]",
        "(?i:[b-dÉ])",
    ),
)
REGEXES = (
    *(
        "a|ab",
        "(a|ab)(c|bcd)?",
        "(?:a|b|)c",
        "|a",
        "(ab|a)*b",
        "a{2}",
        "a{,2}",
        "a{2,}",
        "(ab?){2,3}",
        "a{0}b",
        "x*?y",
        "(a*)*b",
        "e\u0301?",
        "é",
        ".{2}",
    ),
    *(
        r"\.\*",
        r"\x61\t",
        r"\n?",
        "^a$",
        "(^a|b)c",
        "a-b",
        "</f>",
        "(?P<n>a)b",
        "(?x: a b )",
        "(?i)aB",
    ),
)
STRINGS = (
    *(
        "",
        "a",
        "b",
        "ab",
        "aab",
        "abab",
        "ababab",
        "abc",
        "abcd",
        "ac",
        "bc",
        "aa",
        "aaa",
        "e\u0301",
        "é",
        "É",
        "ä",
        "€",
        "😀",
        "éx",
        "aB",
        "AB",
    ),
    *(" a b ", ".*", "xy", "xxy", "y", "a\t", "a-b", "</f>", "a</f>", "\n", "\n\n"),
)
CHARACTERS = (*(text.decode() for text in PRINTABLE), "é", "É", "€", "😀")
# specs of nearly the same text with different meanings
ALIKE: Sequence[tuple[GrammarSpec, GrammarSpec]] = (
    (GrammarSpec("choice", '["a"]'), GrammarSpec("regex", '["a"]')),
    (GrammarSpec("json_schema", "true"), GrammarSpec("regex", "true")),
    (GrammarSpec("grammar", 'start: "a"'), GrammarSpec("regex", 'start: "a"')),
    (GrammarSpec("json_object"), GrammarSpec("regex")),
    (GrammarSpec("regex", '["a"]'), GrammarSpec("choice", '["a"]')),
    (GrammarSpec("regex", "a"), GrammarSpec("regex", " a")),
    (GrammarSpec("regex", "a"), GrammarSpec("regex", "A")),
)


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON Schema, with valid and invalid values."""

    schema: Any
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]
    follows: Callable[[Any], bool]  # in Python


def _is_item(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"a", "n"}
        and value["a"] in ("ab", "x")
        and type(value["n"]) is int
        and 2 <= value["n"] <= 12
    )


ITEM = {
    "type": "object",
    "properties": {
        "a": {"enum": ["ab", "x"]},
        "n": {"type": "integer", "minimum": 2, "maximum": 12},
    },
    "required": ["a", "n"],
    "additionalProperties": False,
}
SCHEMAS = (
    Schema(ITEM, ({"a": "ab", "n": 2}, {"a": "x", "n": 12}), ({"a": "ab", "n": 1}, {"a": "ab"}, {}, [], {"a": "abc", "n": 2}), _is_item),
    Schema(
        {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2, "$defs": {"item": ITEM}},
        ([{"a": "x", "n": 3}], [{"a": "x", "n": 3}, {"a": "ab", "n": 10}]),
        ([], [{}], [{"a": "x", "n": 3}] * 3, {"a": "x", "n": 3}),
        lambda value: isinstance(value, list) and 1 <= len(value) <= 2 and all(map(_is_item, value)),
    ),
    Schema(
        {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]},
        (True, False, None, "a", "cab"),
        ("", "d", "abca", 1, []),
        lambda value: value is None or isinstance(value, bool) or (isinstance(value, str) and re.fullmatch("[a-c]{1,3}", value) is not None),
    ),
    Schema(
        {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "required": ["s"], "additionalProperties": {"type": "boolean"}},
        ({"s": ""}, {"s": "é€x"}, {"s": "a", "b": True}),
        ({}, {"s": "abcd"}, {"s": 1}, {"s": "a", "b": 0}),
        lambda value: isinstance(value, dict) and isinstance(value.get("s"), str) and len(value["s"]) <= 3
        and all(isinstance(other, bool) for key, other in value.items() if key != "s"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Keyword:
    """A schema with one keyword, with values on both sides of its limit."""

    schema: dict[str, Any]
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]


KEYWORDS = (  # backends either reject or enforce them
    Keyword({"type": "integer", "minimum": -3, "maximum": 12}, (-3, 0, 12), (-4, 13, 1.5, 20)),
    Keyword({"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 11}, (0, 10), (-1, 11)),
    Keyword(
        {"type": "number", "minimum": 0.5, "maximum": 1.25}, (0.5, 1, 1.25), (0.49, 0, 1.26, 1.251)
    ),
    Keyword(
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5},
        (0.1, 2.4),
        (0, 0.0, 2.5, -0.1),
    ),
    Keyword({"type": "integer", "multipleOf": 3}, (), (4, 1)),
    Keyword(
        {"type": "string", "minLength": 2, "maxLength": 3},
        ("ab", "abc", "e\u0301x"),
        ("", "a", "é", "😀", "abcd", "e\u0301xx"),
    ),
    Keyword({"type": "string", "minLength": 2}, ("ab", "e\u0301"), ("", "é", "😀")),
    Keyword({"type": "string", "maxLength": 1}, ("", "é", "😀"), ("ab", "e\u0301")),
    Keyword({"type": "string", "pattern": "b"}, ("b",), ("", "a", "ac")),
    Keyword({"type": "string", "pattern": "^(a|bc)$"}, ("a", "bc"), ("abc", "b", "ac")),
    Keyword({"type": "string", "format": "date"}, ("2024-02-29",), ("x", "2024-13-01", "20240101")),
    Keyword(
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        ([True], [True, False]),
        ([], [True] * 3, [1]),
    ),
    Keyword(
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False},
        ([True],),
        ([1], [True, True]),
    ),
    Keyword({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, (), ([1, 1],)),
    Keyword({"type": "array", "contains": {"const": 1}}, (), ([2], [])),
    Keyword({"type": "object", "minProperties": 1}, (), ({},)),
    Keyword({"type": "object", "maxProperties": 1}, (), ({"a": 1, "b": 1},)),
    Keyword({"type": "object", "propertyNames": {"pattern": "^a$"}}, (), ({"b": 1},)),
    Keyword(
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, (), ({"a": "x"},)
    ),
    Keyword({"type": "object", "dependentRequired": {"a": ["b"]}}, (), ({"a": 1},)),
    Keyword(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "unevaluatedProperties": False,
        },
        (),
        ({"b": 1},),
    ),
    Keyword({"type": "integer", "not": {"const": 3}}, (), (3,)),
    Keyword({"if": {"type": "integer"}, "then": {"minimum": 5}}, (), (1,)),
    Keyword({"oneOf": [{"const": 1}, {"type": "integer"}]}, (), (1,)),
    Keyword({"allOf": [{"type": "integer"}, {"minimum": 5}]}, (), (4, "a")),
    Keyword({"enum": [1, "a", None]}, (1, "a", None), (2, "b", True)),
    Keyword({"type": ["integer", "null"]}, (1, None), ("a", True)),
    Keyword({"const": False}, (False,), (True, 0, None, "")),
    Keyword({"const": 0}, (0,), (1, False, "0")),
    Keyword({"const": ""}, ("",), ("a", None)),
    Keyword({"const": None}, (None,), (0, "a")),
    Keyword({"type": "integer", "minimum": 0}, (0, 1), (-1,)),
    Keyword({"type": "integer", "maximum": 0}, (0, -1), (1,)),
    Keyword({"type": "string", "maxLength": 0}, ("",), ("a",)),
    Keyword({"type": "array", "maxItems": 0}, ([],), ([1],)),
    Keyword(
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"]}, (), ({"a": 1}, {})
    ),
    Keyword(
        {"type": "object", "properties": {"a": False, "b": {"const": 1}}},
        ({"b": 1},),
        ({"a": 1}, {"a": None}),
    ),
    Keyword({"$ref": "#/$defs/i", "maximum": 5, "$defs": {"i": {"type": "integer"}}}, (), (6, "a")),
    Keyword({"type": "string", "pattern": "^ab"}, (), ("xab", "b")),
    Keyword({"type": "string", "pattern": "ab$"}, (), ("abx", "b")),
)
# wrapper of a schema, and of a valid value
NESTS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "alone": (lambda schema: schema, lambda value: value),
    "a property": (
        lambda schema: {
            "type": "object",
            "properties": {"k": schema},
            "required": ["k"],
            "additionalProperties": False,
        },
        lambda value: {"k": value},
    ),
    "an item": (lambda schema: {"type": "array", "items": schema}, lambda value: [value]),
    "the first item": (
        lambda schema: {"type": "array", "prefixItems": [schema], "items": False},
        lambda value: [value],
    ),
    "a further property": (
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda value: {"z": value},
    ),
    "an alternative": (
        lambda schema: {"anyOf": [{"const": {"n": 0}}, schema]},
        lambda value: value,
    ),
    "a definition": (
        lambda schema: {"$ref": "#/$defs/d", "$defs": {"d": schema}},
        lambda value: value,
    ),
}
OBJECTS: tuple[Any, ...] = (
    {},
    {"a": 1},
    {"a": [1, -2.5, "x", None, True, {}], "b": {"c": {"d": []}}},
)
NO_OBJECTS: tuple[Any, ...] = ([], 1, "a", True, None)


def spellings(value: Any) -> Iterator[str]:
    """Yield JSON of a value in the usual ways."""
    for separators in ((",", ":"), (", ", ": "), (",", ": "), (", ", ":")):
        yield json.dumps(value, separators=separators, ensure_ascii=False)
    yield json.dumps(value, indent=2, ensure_ascii=False)


# specs that are invalid, not regular, or describe no text
BROKEN: Mapping[SpecKind, tuple[str, ...]] = {
    "regex": (
        "(a",
        "a{3,1}",
        "[b-a]",
        r"(a|b)\1",
        "(?=a)b",
        "a(?!b)",
        r"(?<=a)b",
        r"\bab",
        "*",
        "(" * 20_000 + ")" * 20_000,
    ),
    "choice": ("", "[]", '"a"', "[1]", '["a", null]', "{}", '["a"', r'["\ud800"]'),
    "json_schema": (
        *(
            "",
            "{",
            "[]",
            "3",
            "false",
            '{"type": "strng"}',
            '{"type": 5}',
            '{"properties": 5}',
            '{"$ref": "#/$defs/nowhere"}',
            '{"enum": []}',
        ),
        *(
            '{"$ref": "#"}',
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": '
            '"#/$defs/a"}}}',
        ),
        *(
            '{"type": "string", "pattern": "(?=a)b"}',
            '{"type": "string", "pattern": "("}',
            '{"$ref": "https://example.org/schema"}',
        ),
        '{"items":' * 20_000 + "{}" + "}" * 20_000,
    ),
    "grammar": (
        "",
        'start: "a',
        "start: nowhere",
        "root ::= nowhere",
        "root ::= (",
        "nonsense",
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    ),
    "structural_tag": (
        *(
            "",
            "[]",
            "{}",
            '{"structures": [], "triggers": ["<f"]}',
            '{"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": []}',
        ),
        '{"structures": [{"begin": "<g>", "schema": {}, "end": ""}], "triggers": ["<f"]}',
        '{"structures": [{"begin": "<f>", "schema": {"type": "strng"}, "end": ""}], "triggers": '
        '["<f"]}',
    ),
}
