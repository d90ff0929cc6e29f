"""Tests of the backend: it compiles some grammars, rejects the others by name, and random answers
follow their schemas."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from dovetail.api.grammar import Grammar, GrammarContext, GrammarSpec
from dovetail.errors import DovetailError, RequestError

from dovetail_xgrammar import backend as backend_module
from dovetail_xgrammar.backend import XGrammar
from dovetail_xgrammar.options import XGrammarOptions

STOP = 256
BYTES = GrammarContext([*(bytes([byte]) for byte in range(256)), None], frozenset([STOP]), 257)
LONGEST = 300
ENDING = b'"}]10'


@pytest.fixture(scope="session")
def backend() -> XGrammar:
    return XGrammar(XGrammarOptions(), BYTES)


def takes(grammar: Grammar, text: str) -> bool:
    """Return True if `text` is a whole answer."""
    matcher = grammar.begin()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(STOP)


def written(grammar: Grammar, chance: random.Random) -> bytes | None:
    """Return an answer of bytes that chance takes from the masks; None if it is too long."""
    matcher = grammar.begin()
    words = np.zeros(9, dtype=np.uint32)
    text = b""
    while len(text) < LONGEST:
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        ending = [byte for byte in allowed if byte == STOP or byte in ENDING]
        late = len(text) > 20
        byte = chance.choice(ending if ending and late else allowed)
        assert matcher.accept(byte)
        if byte == STOP:
            return text
        text += bytes([byte])
    return None


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
FOLLOWED: list[Any] = [
    True,
    {},
    PERSON,
    {"properties": {"a": PERSON, "b": {"type": "null"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {}, "ab": {}}, "additionalProperties": {"const": 1}},
    {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"enum": [1, "a", [2]]}, "minItems": 1},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^(ab|c[^a-z]){1,3}$"},
    {"type": "integer", "minimum": -17, "maximum": 2305},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 10_000},
    {"type": "integer", "maximum": -8},
    {"anyOf": [{"$ref": "#/$defs/p"}, {"type": "boolean"}], "$defs": {"p": PERSON}},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": "number"}},
                "additionalProperties": False,
            }
        },
    },
]


@pytest.mark.parametrize("schema", FOLLOWED, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_by_chance_follow_their_schema(backend: XGrammar, schema: Any) -> None:
    grammar = backend.compile(GrammarSpec("json_schema", json.dumps(schema)))
    validator = jsonschema.Draft202012Validator(schema)
    answers = [written(grammar, random.Random(seed)) for seed in range(20)]
    ended = [answer for answer in answers if answer is not None]
    assert ended
    for answer in ended:
        validator.validate(json.loads(answer))


@pytest.mark.parametrize("bounds", [(0, 0), (-1, 1), (7, 13), (-205, -98), (5, None), (None, 12)])
def test_whole_numbers_are_those_within_their_bounds(
    backend: XGrammar, bounds: tuple[int | None, int | None]
) -> None:
    low, high = bounds
    schema = {"type": "integer"}
    schema |= {} if low is None else {"minimum": low}
    schema |= {} if high is None else {"maximum": high}
    grammar = backend.compile(GrammarSpec("json_schema", json.dumps(schema)))
    for number in (*range(-250, 250), 10**12, -(10**12)):
        within = (low is None or number >= low) and (high is None or number <= high)
        assert takes(grammar, str(number)) == within, number


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "#: uniqueItems = true"),
        ({"properties": {"a": {"format": "date"}}}, "#/properties/a: format"),
        ({"type": "number", "minimum": 1}, "#: minimum = 1"),
        ({"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": {}}}, r"maxLength = 3: .* \$ref"),
        ({"oneOf": [{"type": "string"}]}, "#: oneOf"),
        ({"items": {"not": {}}}, "#/items: not"),
        ({"enum": ["a", 1], "type": "string"}, "the given type"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no whole number satisfies"),
        ({"type": "integer", "minimum": 1.5}, "minimum = 1.5"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength = 5"),
        ({"type": "string", "maxLength": 2**32}, f"maxLength = {2**32}"),
        ({"type": "string", "pattern": r"^a\x01b$"}, "pattern = "),
        ({"required": ["a"]}, "required: 'a'"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}, "circular: #, #/"),
        (
            {"properties": {"a": {"$ref": "#/properties/b"}}},
            r"properties/a: \$ref = .* expected # or",
        ),
    ],
)
def test_a_refusal_names_the_place_and_the_keyword(
    backend: XGrammar, schema: Any, says: str
) -> None:
    with pytest.raises(RequestError, match=f"^json_schema: .*{says}"):
        backend.compile(GrammarSpec("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("structural_tag", "{}", "structural_tag: the backend xgrammar doesn't support this kind"),
        ("grammar", 'start: "a"', "takes grammars in GBNF"),
        ("regex", "a(?=b)", "a lookaround can't be followed"),
        ("regex", "(", "invalid regular expression"),
        ("choice", '["a", 1]', "a list of one string or more"),
        ("json_schema", '{"minimum": NaN}', "NaN isn't JSON"),
        ("json_schema", '{"items":' * 101 + "{}" + "}" * 101, "nested more than 100"),
        ("json_schema", '{"const": 1e400}', "1e400"),
    ],
)
def test_what_it_cannot_do_is_refused_in_plain_words(
    backend: XGrammar, kind: Any, text: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        backend.compile(GrammarSpec(kind, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(
            "grammar",
            "\n".join(["root ::= r0", *(f'r{n} ::= "b" r{n + 1} | "a"' for n in range(1000))])
            + '\nr1000 ::= "z"',
        ),
        GrammarSpec(
            "json_schema",
            json.dumps(
                {
                    "$ref": "#/$defs/d0",
                    "$defs": {
                        **{f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(200)},
                        "d200": {},
                    },
                }
            ),
        ),
    ],
    ids=["rules", "schemas"],
)
def test_a_long_chain_of_references_ends_no_process(backend: XGrammar, spec: GrammarSpec) -> None:
    assert backend.compile(spec).begin().accept(ord("b" if spec.kind == "grammar" else "["))


@pytest.mark.parametrize("pattern", [r"\d{2,}", "[^a]b|(?i:c)", "é+?", "(?s:.)", r"a\.b", ""])
def test_a_regular_expression_is_that_of_python(backend: XGrammar, pattern: str) -> None:
    grammar = backend.compile(GrammarSpec("regex", pattern))
    for text in ("", "1", "12", "xb", "ab", "C", "ééé", "\n", "a.b", "a-b"):
        assert takes(grammar, text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


def test_an_ambiguous_grammar_fails_alone(
    backend: XGrammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    ambiguous, plain = (
        backend.compile(GrammarSpec("grammar", text)).begin()
        for text in ('root ::= a\na ::= a a | "a" | "b"', "root ::= [ab]*")
    )
    lines = np.zeros((2, 9), dtype=np.uint32)
    for token in b"abab":
        backend.fill_many([ambiguous, plain], lines)
        assert ambiguous.accept(token)
        assert plain.accept(token)
    monkeypatch.setattr(backend_module, "MOST_MASK_S", 0.0)
    with pytest.raises(DovetailError, match="too ambiguous for the backend xgrammar"):
        backend.fill_many([ambiguous, plain], lines)
    monkeypatch.undo()
    with pytest.raises(DovetailError, match="too ambiguous"):
        ambiguous.fill(lines[0])
    plain.fill(lines[1])
