"""Masks in strings of bounded length are computed from a table and, for other tokens, by the
library; the library alone is the oracle."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dovetail.api.grammar import GrammarContext, GrammarSpec
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.llguidance_matcher import Lanes, LLGrammar, LLMatcher
from dovetail_grammars.options import GrammarOptions
from dovetail_grammars.positions import Tracker
from tests.structured.vocabularies import MAKERS, vocabulary
from tests.structured.walks import allowed
from tests.support import FULL

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

WALKS = 8 if FULL else 3  # for each schema
STRING = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {**STRING, "maxLength": 7},
        "tags": {"type": "array", "items": {**STRING, "maxLength": 3}, "maxItems": 4},
        "note": {"anyOf": [{**STRING, "maxLength": 5, "minLength": 2}, {"type": "null"}]},
        "free": STRING,
        "level": {"enum": ["ab", "abc"]},
        "word": {**STRING, "pattern": "^[a-z]{2,9}$", "maxLength": 6},
        "map": {
            "type": "object",
            "additionalProperties": {**STRING, "maxLength": 2, "minLength": 1},
        },
        "either": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"v": {**STRING, "maxLength": 4}},
                    "required": ["v"],
                },
                {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "w": {**STRING, "maxLength": 9}},
                    "required": ["v", "w"],
                },
            ]
        },
        "unlike": {"anyOf": [{**STRING, "maxLength": 2}, {**STRING, "pattern": "^[x-z]{0,9}$"}]},
        "tree": {"$ref": "#/$defs/node"},
        "pair": {
            "type": "array",
            "prefixItems": [{**STRING, "maxLength": 1}, {**STRING, "maxLength": 8}],
            "items": False,
        },
        "anything": {},
    },
    "required": ["tags", "map", "pair"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                'x"é\n': {"type": ["string", "integer"], "maxLength": 6},
                "node": {"$ref": "#/$defs/node"},
            },
        }
    },
}


@cache
def backend(name: str, **options: Any) -> LLGuidance:
    """Return a backend for the vocabulary of that name. It takes a second to make: all of 150,000
    tokens are read."""
    return LLGuidance(GrammarOptions(threads=2, processes=0, **options), vocabulary(name))


@pytest.fixture(scope="module", autouse=True)
def _the_largest_vocabulary_is_read() -> None:
    backend("byte-level")


def compiled(backend: LLGuidance, schema: Any) -> tuple[LLGrammar, LLGrammar]:
    """Return the grammar, and the same without the table."""
    grammar = backend.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert isinstance(grammar, LLGrammar)
    return grammar, LLGrammar(grammar.fill, grammar.whole)


def mask(matcher: Any, context: GrammarContext) -> UInt32:
    words = np.zeros(-(-context.vocab_size // 32), dtype=np.uint32)
    matcher.fill(words)
    return words


@cache
def structural(name: str) -> set[int]:
    return {
        token
        for token, text in enumerate(vocabulary(name).token_bytes)
        if text and text[:1] in b'"\\{}[],:'
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow("a large table"))
        if name == "byte-level"
        else name
        for name in MAKERS
    ],
)
@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
@pytest.mark.parametrize(
    "walks",
    [range(1), pytest.param(range(1, WALKS), marks=pytest.mark.slow("more walks"))],
    ids=["one", "more"],
)
def test_every_mask_of_an_answer_is_the_library_s_own(
    name: str, whitespace: str, walks: range
) -> None:
    context = vocabulary(name)
    grammar, oracle = compiled(backend(name, whitespace=whitespace), SCHEMA)
    tabled = 0
    for seed in walks:
        chance = random.Random(seed)
        ours, theirs, text = grammar.begin(), oracle.begin(), b""
        assert isinstance(ours, LLMatcher)
        for _ in range(100 if walks.start else 50):
            words = mask(ours, context)
            assert (words == mask(theirs, context)).all(), text
            tokens = allowed(words, context).tolist()
            tabled += ours.room is not None
            token = chance.choice(tokens)
            if chance.random() < 0.5:
                token = chance.choice(sorted(structural(name).intersection(tokens)) or [token])
            if chance.random() < 0.1:
                forbidden = chance.randrange(context.vocab_size)
                assert ours.accept(forbidden) == (forbidden in tokens), text
                ours.rollback(int(forbidden in tokens))
            if chance.random() < 0.1:  # and back
                assert ours.accept(token)
                ours.rollback(1)
            assert ours.accept(token)
            assert theirs.accept(token)
            assert ours.complete == theirs.complete
            if ours.complete:
                break
            text += context.token_bytes[token] or b""
    assert tabled > min(20, 6 * len(walks)), "the table was hardly asked"


@pytest.mark.slow("tries large sizes")
def test_whatever_room_is_left_each_token_of_the_vocabulary_is_judged_as_by_the_library() -> None:
    context = vocabulary("byte-level")
    llguidance = backend("byte-level")
    quote = context.token_bytes.index(b'"')
    for room in range(22):
        ours, theirs = (
            grammar.begin() for grammar in compiled(llguidance, {**STRING, "maxLength": room})
        )
        assert ours.accept(quote)
        assert theirs.accept(quote)
        assert (mask(ours, context) == mask(theirs, context)).all(), room


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "required": ["foo"]},
        {
            "type": "object",
            "properties": {"fob": STRING},
            "required": ["foo", "fob"],
            "additionalProperties": {**STRING, "maxLength": 3},
        },
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
        {"type": "object", "maxProperties": 1, "additionalProperties": {**STRING, "maxLength": 2}},
        {"const": {"ab": 1}},
        {"type": "object", "enum": [{"ab": 1}, {"abc": "d"}]},
        {
            "anyOf": [
                {"const": {"ab": 1}},
                {"type": "object", "additionalProperties": {**STRING, "maxLength": 2}},
            ]
        },
        {
            "anyOf": [
                {"type": "object", "properties": {"a": STRING}, "additionalProperties": False},
                {"type": "object", "required": ["b"]},
            ]
        },
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"a": {**STRING, "maxLength": 4, "minLength": 3}, "b": STRING},
                    "required": ["a", "b"],
                },
                {
                    "type": "object",
                    "properties": {"a": {**STRING, "maxLength": 4}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            ]
        },
    ],
)
def test_every_mask_of_an_object_is_the_library_s_own_whichever_keys_it_may_have(
    schema: Any,
) -> None:
    context = vocabulary("byte-level")
    grammar, oracle = compiled(
        backend("byte-level"), {"anyOf": [schema, {**STRING, "maxLength": 1}]}
    )
    assert grammar.tracker is not None
    for seed in range(WALKS if FULL else 1):
        chance = random.Random(seed)
        ours, theirs, text = grammar.begin(), oracle.begin(), b""
        for step in range(40):
            words = mask(ours, context)
            assert (words == mask(theirs, context)).all(), text
            tokens = allowed(words, context).tolist()
            token = (
                chance.choice(sorted(structural("byte-level").intersection(tokens)) or tokens)
                if chance.random() < 0.5
                else chance.choice(tokens)
            )
            if not step:
                token = context.token_bytes.index(b"{")
            assert ours.accept(token)
            assert theirs.accept(token)
            if ours.complete:
                break
            text += context.token_bytes[token] or b""


class Counted:
    """A matcher of the library that counts the masks computed by it and its copies."""

    def __init__(self, inner: Any, asked: list[None]) -> None:
        self._inner, self._asked = inner, asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def deep_copy(self) -> Counted:
        return Counted(self._inner.deep_copy(), self._asked)

    def unsafe_compute_mask_ptr(self, *where: int) -> None:
        self._asked.append(None)
        self._inner.unsafe_compute_mask_ptr(*where)


def test_the_library_is_asked_once_a_string() -> None:
    context = vocabulary("byte-level")
    grammar, oracle = compiled(
        backend("byte-level"), {"type": "array", "items": {**STRING, "maxLength": 9}}
    )
    asked: list[None] = []
    lanes = [
        Lanes(lambda _, first=lanes.firsts[0]: Counted(first.deep_copy(), asked))
        for lanes in (grammar.whole, grammar.rest)
        if lanes is not None
    ]
    ours, theirs = LLGrammar(grammar.fill, *lanes, grammar.tracker).begin(), oracle.begin()
    for letter in b'["abcdefghi","abcdefghi"]':
        assert (mask(ours, context) == mask(theirs, context)).all()
        token = context.token_bytes.index(bytes([letter]))
        assert ours.accept(token)
        assert theirs.accept(token)
    assert len(asked) == len('["",""]'), "each letter's mask was the library's"


@pytest.mark.parametrize(
    ("schema", "text", "longest", "characters"),
    [
        ({**STRING, "maxLength": 5}, '"aé\\n', 5, 3),
        ({**STRING, "maxLength": 5}, '"a"', None, 0),
        ({**STRING, "maxLength": 5}, '"a\\', None, 2),
        (STRING, '"ab', math.inf, 2),
        (True, '{"a":["b', math.inf, 1),
        (SCHEMA, '{"name', None, 4),
        (SCHEMA, '{"names', math.inf, 5),
        ({"type": "object"}, '{"', math.inf, 0),
        ({"type": "object", "patternProperties": {"a": STRING}}, '{"a', None, 1),
        (SCHEMA, '{ "name" : "Jo', 7, 2),
        (SCHEMA, '{"name":"Jo","tags":["a","bc', 3, 2),
        (SCHEMA, '{"tags":[],"map":{"name":"x', 2, 1),
        (SCHEMA, '{"tags":[],"other":"x', math.inf, 1),
        (SCHEMA, '{"note":"x', 5, 1),
        (SCHEMA, '{"level":"a', None, 1),
        (SCHEMA, '{"word":"a', None, 1),
        (SCHEMA, '{"unlike":"x', None, 1),
        (SCHEMA, '{"pair":["x', None, 1),
        (SCHEMA, '{"either":{"v":"x', 4, 1),
        (SCHEMA, '{"either":{"v":1,"w":"x', None, 1),
        (SCHEMA, '{"tree":{"node":{"node":{"x\\"é\\n":"x', 6, 1),
        ({"allOf": [{**STRING, "maxLength": 5}]}, '"a', None, 1),
        (
            {"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": {**STRING, "maxLength": 5}}},
            '"a',
            None,
            1,
        ),
        (
            {"type": "object", "patternProperties": {"a": {**STRING, "maxLength": 5}}},
            '{"a":"a',
            None,
            1,
        ),
        (
            {"enum": [{"a": "b"}], "properties": {"a": {**STRING, "maxLength": 5}}},
            '{"a":"a',
            None,
            1,
        ),
        (
            {"type": "object", "unevaluatedProperties": {**STRING, "maxLength": 5}},
            '{"a":"a',
            None,
            1,
        ),
    ],
)
def test_the_length_of_a_string_is_known_where_nothing_else_restrains_it(
    schema: Any, text: str, longest: float | None, characters: int
) -> None:
    tracker = Tracker(schema)
    position, so_far = tracker.start, 0
    for token, byte in enumerate(text.encode()):
        position, more, begins = tracker.step(position, token, bytes([byte]))
        so_far = more if begins else so_far + more
    assert position.longest == longest
    if position.in_string:
        assert so_far == characters
    whole = tracker.step(tracker.start, -1, text.encode())
    assert whole.to.longest == longest, "in one token"
    assert whole.characters == (characters if position.in_string else 0)
