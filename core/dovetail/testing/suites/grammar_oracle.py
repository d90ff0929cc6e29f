"""The oracle of `GrammarSuite`: a small vocabulary, and languages whose texts are known by other means than a grammar library.

A token may come if some text of the language begins with what there is and the token's bytes. Languages are lists of texts, filtered by Python's `re`
where they come from a regular expression, so that this shares no code and no idea with what it judges.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dovetail.api.grammar import GrammarContext, GrammarSpec, SpecKind

PRINTABLE = [bytes([byte]) for byte in range(0x20, 0x7F)] + [b"\n", b"\t"]
PARTS = [bytes([byte]) for byte in sorted(set("éä€😀".encode()))]  # bytes of characters that have several
PIECES = [
    *(b"ab", b"abc", b"bc", b"bd", b"aa", b"cd", b"  ", b'{"', b'":', b'"a":', b"},", b"true", b"<f", b"<fg>2;", b"1</f", b"f>1", b"\n\t"),
    *("é".encode(), "€x".encode(), b"\xa9x", b"\x82\xac", b"x\xc3"),
]
TWICE = [b"a", b"ab", "é".encode()]  # another id of the same text
STOP_TEXT = b"</f>"  # of the second stop id, which is no text for all that


def vocabulary(*, stops: int = 2, padding: int = 3) -> GrammarContext:
    """Return a vocabulary with tokens that are never text: two empty ones, some without bytes, and the stop ids."""
    tokens: list[bytes | None] = [None, *PRINTABLE, b"", *PARTS, *PIECES, *TWICE, b""]
    first = len(tokens)
    tokens += [None, STOP_TEXT][:stops] + [None] * padding
    return GrammarContext(tokens, frozenset(range(first, first + stops)), len(tokens))


CONTEXT = vocabulary()
LONGEST_TOKEN = max(len(token) for token in CONTEXT.token_bytes if token)


def text_of(token: int) -> bytes:
    """Return a token's bytes; none if it is never text."""
    return b"" if token in CONTEXT.stop_ids else CONTEXT.token_bytes[token] or b""


def ids_of(text: str | bytes) -> list[int]:
    """Return the text as tokens of one byte each."""
    data = text.encode() if isinstance(text, str) else text
    return [CONTEXT.token_bytes.index(bytes([byte])) for byte in data]


class Language(ABC):
    """A set of texts. `open`: ids of which it isn't told whether they may come."""

    open: frozenset[int] = frozenset()

    @abstractmethod
    def has(self, text: bytes) -> bool: ...

    @abstractmethod
    def begins(self, text: bytes) -> bool:
        """True if some text of the language begins so."""

    def knows(self, text: bytes) -> bool:
        """True if `allowed` can be told of this text."""
        return True

    def allowed(self, text: bytes) -> set[int]:
        """Return the ids that may come behind `text`."""
        ids = {id for id in range(CONTEXT.vocab_size) if text_of(id) and self.begins(text + text_of(id))}
        return ids | CONTEXT.stop_ids if self.has(text) else ids


class Listed(Language):
    """The texts of a language: all, or all that tell which beginnings of up to `known_to` bytes there are."""

    def __init__(self, texts: Iterable[str], known_to: int | None = None) -> None:
        self.texts = {text.encode() for text in texts}
        self.beginnings = {text[:end] for text in self.texts for end in range(len(text) + 1)}
        self.known_to = known_to
        letters = set().union(*self.texts)
        self.longest = max(len(text_of(id)) for id in range(CONTEXT.vocab_size) if letters.issuperset(text_of(id)))

    def has(self, text: bytes) -> bool:
        return text in self.texts

    def begins(self, text: bytes) -> bool:
        return text in self.beginnings

    def knows(self, text: bytes) -> bool:
        return self.known_to is None or len(text) + self.longest <= self.known_to


class Tagged(Language):
    """Free text with structures at triggers: `bodies` are the structures, each one text. It is ASCII: whether other bytes may come, and in which
    order, isn't told."""

    open = frozenset(id for id in range(CONTEXT.vocab_size) if not text_of(id).isascii())

    def __init__(self, trigger: str, bodies: Iterable[str]) -> None:
        self.trigger, self.bodies = trigger.encode(), [body.encode() for body in bodies]

    def has(self, text: bytes) -> bool:
        return self._open(text) is None

    def begins(self, text: bytes) -> bool:
        if not text.isascii():
            return False
        unfinished = self._open(text)
        return unfinished is None or any(body.startswith(unfinished) for body in self.bodies)

    def _open(self, text: bytes) -> bytes | None:
        """Return the structure that isn't finished, which may also be a wrong one; None if there is only free text after the last."""
        while (start := text.find(self.trigger)) >= 0:
            text = text[start:]
            body = next((body for body in self.bodies if text.startswith(body)), None)
            if body is None:
                return text
            text = text[len(body) :]
        return None


@dataclass(frozen=True, slots=True)
class Case:
    """A spec, and the language that it describes."""

    spec: GrammarSpec
    language: Language

    def __str__(self) -> str:
        return f"{self.spec.kind} {self.spec.text!r}"


def _regex(pattern: str, alphabet: str, length: int) -> Case:
    """`alphabet`: all characters that the language has. Each of its beginnings is one character at most away from a text, and texts longer than
    `length` are left out."""
    texts = ("".join(letters) for n in range(length + 1) for letters in product(alphabet, repeat=n))
    return Case(GrammarSpec("regex", pattern), Listed((text for text in texts if re.fullmatch(pattern, text, re.ASCII)), length - 1))


def _choice(*texts: str) -> Case:
    return Case(GrammarSpec("choice", json.dumps(texts)), Listed(texts))


def _nested(grammar: str) -> Case:
    """`grammar` describes as many "a" as "b" around one "c"."""
    return Case(GrammarSpec("grammar", grammar), Listed((f"{'a' * n}c{'b' * n}" for n in range(12)), 11))


def _tags(trigger: str, *structures: tuple[str, int, str]) -> Case:
    """Structures of a constant between two texts."""
    spec = {"structures": [{"begin": begin, "schema": {"const": n}, "end": end} for begin, n, end in structures], "triggers": [trigger]}
    return Case(GrammarSpec("structural_tag", json.dumps(spec)), Tagged(trigger, [f"{begin}{n}{end}" for begin, n, end in structures]))


WORDS = [chr(code) for code in range(128) if chr(code).isalnum() or code == ord("_")]

CASES = (
    _regex("a(b|bc)*d?", "abcd", 8),
    _regex("^(abc|abd|a|(ab)?(cd)+)$", "abcd", 8),
    _regex("(?P<zeros>x*[0-2]){0,2}", "x012", 8),
    _regex("(?i:ab)+|(?:c-)*?", "aAbBcC-", 6),
    _regex("(é|ä|[€x])*x?", "éä€x", 7),
    Case(GrammarSpec("regex", r"\d-\w"), Listed(f"{digit}-{word}" for digit in range(10) for word in WORDS)),
    _choice("a", "ab", "abc", "b", "bd", "abcx"),
    _choice("true", "tr\n\t", '"a":', "\\", "{}", "", "é", "€x", "x😀"),
    _tags("<f", ("<f>", 1, "</f>"), ("<fg>", 2, ";")),
)
SYNTAXES: Mapping[str, Case] = {  # of the same language; a backend reads one at least
    "Lark": _nested('start: "a" start "b" | "c"'),
    "GBNF": _nested('root ::= "a" root "b" | "c"'),
}


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON Schema, with values that follow it and values that don't."""

    schema: Any
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]
    follows: Callable[[Any], bool]  # told in Python


def _is_item(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"a", "n"} and value["a"] in ("ab", "x") and type(value["n"]) is int and 2 <= value["n"] <= 12


ITEM = {
    "type": "object",
    "properties": {"a": {"enum": ["ab", "x"]}, "n": {"type": "integer", "minimum": 2, "maximum": 12}},
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
OBJECTS: tuple[Any, ...] = ({}, {"a": 1}, {"a": [1, -2.5, "x", None, True, {}], "b": {"c": {"d": []}}})
NO_OBJECTS: tuple[Any, ...] = ([], 1, "a", True, None)


def spellings(value: Any) -> Iterator[str]:
    """Yield JSON of a value in the usual ways."""
    for separators in ((",", ":"), (", ", ": "), (",", ": "), (", ", ":")):
        yield json.dumps(value, separators=separators, ensure_ascii=False)
    yield json.dumps(value, indent=2, ensure_ascii=False)


BROKEN: Mapping[SpecKind, tuple[str, ...]] = {  # specs that are wrong, or describe what can't be followed token by token, or nothing at all
    "regex": ("(a", "a{3,1}", "[b-a]", r"(a|b)\1", "(?=a)b", "a(?!b)", r"(?<=a)b", r"\bab", "*", "(" * 20_000 + ")" * 20_000),
    "choice": ("", "[]", '"a"', "[1]", '["a", null]', "{}", '["a"', r'["\ud800"]'),
    "json_schema": (
        *("", "{", "[]", "3", "false", '{"type": "strng"}', '{"type": 5}', '{"properties": 5}', '{"$ref": "#/$defs/nowhere"}', '{"enum": []}'),
        *('{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'),
        *('{"type": "string", "pattern": "(?=a)b"}', '{"type": "string", "pattern": "("}', '{"$ref": "https://example.org/schema"}'),
        '{"items":' * 20_000 + "{}" + "}" * 20_000,
    ),
    "grammar": ("", 'start: "a', "start: nowhere", "root ::= nowhere", "root ::= (", "nonsense", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "structural_tag": (
        *("", "[]", "{}", '{"structures": [], "triggers": ["<f"]}', '{"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": []}'),
        '{"structures": [{"begin": "<g>", "schema": {}, "end": ""}], "triggers": ["<f"]}',
        '{"structures": [{"begin": "<f>", "schema": {"type": "strng"}, "end": ""}], "triggers": ["<f"]}',
    ),
}
