"""Numbers and strings of a schema come into the answer exactly as they are, or the schema is
refused by keyword and value: never another value."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.grammar import Grammar
from dovetail.errors import RequestError
from tests.grammars.helpers import BYTES, STOP, compiled
from tests.support import examples

LONGEST = 60  # bytes of an answer, unless it is left unfinished
EDGES = [0, 1, 2**31, 2**32, 10**15, 2**53, 10**18, 2**60, 2**63, 2**64, 10**19, 10**22, 10**30]
INTEGERS = st.builds(
    lambda edge, near, sign: sign * (edge + near),
    st.sampled_from(EDGES),
    st.integers(-2, 2),
    st.sampled_from([1, -1]),
)
INTEGERS |= st.integers(-(10**20), 10**20)
DECIMALS = (
    st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-10, 10, width=32)
    | st.decimals(-99, 99, places=3).map(float)
)
DECIMALS |= st.sampled_from(
    [-0.0, 1.0, 1e22, 1e23, 1e-7, 0.1, 0.30000000000000004, 5e-324, 123456789.123456789]
)
NUMBERS = INTEGERS | DECIMALS
TEXTS = st.text(st.sampled_from('a"\\/é😀\u2028') | st.characters(max_codepoint=0xA0), max_size=5)
VALUES = st.recursive(
    NUMBERS | TEXTS | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)
CONTROLS = st.sampled_from(
    [
        "\x00",
        "\x01",
        "\x1f",
        "\x7f",
        "\n",
        r"\x01",
        r"\t",
        r"\v",
        r"[\x01\x02]",
        r"[\x01a]",
        r"\x7f",
        r"(?:\x02|b)",
        r"\x01{2}",
    ]
)
PATTERNS = st.lists(
    CONTROLS | st.sampled_from(["a", "[a-c]", "1", "é"]), min_size=1, max_size=3
).map(lambda parts: f"^{''.join(parts)}$")


@st.composite
def numbers_within(draw: st.DrawFn) -> dict[str, Any]:
    """Bounds that are often narrow, and seldom contradict each other."""
    least = draw(NUMBERS)
    rule: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    if draw(st.booleans()):
        rule[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = least
    if draw(st.booleans()):
        rule[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = draw(
            NUMBERS.filter(lambda most: most >= least) | st.just(least + 1)
        )
    if draw(st.integers(0, 3)) == 0:
        rule["multipleOf"] = draw(
            st.integers(1, 2**33) | st.sampled_from([0.5, 0.1, 0.07, 0.29, 1e-9, 1.25])
        )
    return rule


PARTS = st.recursive(
    VALUES.map(lambda value: {"const": value})
    | st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values})
    | numbers_within()
    | PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
    lambda inner: (
        inner.map(lambda rule: {"type": "array", "items": rule, "minItems": 1, "maxItems": 1})
        | st.tuples(inner, inner).map(lambda rules: {"anyOf": list(rules)})
        | st.tuples(TEXTS, inner).map(
            lambda one: {
                "type": "object",
                "properties": {one[0]: one[1]},
                "required": [one[0]],
                "additionalProperties": False,
            }
        )
        | st.tuples(PATTERNS, inner).map(
            lambda one: {
                "type": "object",
                "patternProperties": {one[0]: one[1]},
                "additionalProperties": False,
                "minProperties": 1,
            }
        )
    ),
    max_leaves=2,
)
RULES = PARTS | PARTS.map(lambda rule: {"$ref": "#/$defs/a", "$defs": {"a": rule}})


@examples(quick=150, full=3000)
@given(rule=RULES, seed=st.integers(0, 2**32))
def test_an_answer_follows_its_schema_to_the_last_digit_and_character(
    rule: dict[str, Any], seed: int
) -> None:
    grammar, refusal = tried(rule)
    if grammar is None:
        assert any(key in refusal for key in _keys(rule)), refusal
        return
    for number in range(3):
        answer = written(grammar, random.Random(seed + number))
        if answer is not None:
            assert is_valid(rule, json.loads(answer)), (
                f"{answer!r} doesn't follow {json.dumps(rule)}"
            )


def tried(rule: Any) -> tuple[Grammar | None, str]:
    try:
        return compiled("json_schema", rule), ""
    except RequestError as error:
        return None, str(error)


def written(grammar: Grammar, chance: random.Random) -> bytes | None:
    """Return an answer of bytes that chance takes from the masks; None if it is too long."""
    matcher, text = grammar.begin(), b""
    words = np.zeros(9, dtype=np.uint32)
    while len(text) < LONGEST:
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        byte = STOP if STOP in allowed and chance.random() < 0.3 else chance.choice(allowed)
        assert matcher.accept(byte)
        if byte == STOP:
            return text
        text += BYTES.token_bytes[byte] or b""
    return None


def _multiple(validator: Any, multiple: Any, value: Any, rule: Any) -> Any:
    """jsonschema's own divides doubles. Those with many digits were read as other numbers than were
    written."""
    if (
        type(value) in (int, float)
        and abs(value) < 1e9
        and Fraction(repr(value)) % Fraction(repr(multiple))
    ):
        yield jsonschema.ValidationError("no multiple")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _multiple})


def is_valid(rule: Any, value: Any) -> bool:
    return bool(Validator(rule).is_valid(value))


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


KEPT: list[Any] = [
    2**53,
    -(2**53),
    2**63 - 1,
    10**15 + 1,
    0.1,
    1.5e-5,
    -0.25,
    1e15,
    'é\n\t"\\\u2028',
    {"a\x01": 1},
]


def test_what_is_exact_is_not_refused() -> None:
    for value in KEPT:
        for rule in (
            {"const": value},
            {"enum": [value]},
            {"type": "array", "prefixItems": [{"const": value}], "items": False, "minItems": 1},
        ):
            answer = written(compiled("json_schema", rule), random.Random(0))
            assert answer is not None
            assert is_valid(rule, json.loads(answer))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            {"properties": {"id": {"const": 2**64 + 1}}},
            "#/properties/id: const = 18446744073709551617",
        ),
        ({"items": {"enum": [1, [2**64 + 1]]}}, "#/items: enum = 18446744073709551617"),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/n"},
                "$defs": {"n": {"type": "integer", "minimum": -(2**65)}},
            },
            f"#/[$]defs/n: minimum = {-(2**65)}",
        ),
        ({"type": "number", "exclusiveMaximum": 10**30}, f"#: exclusiveMaximum = {10**30}"),
        ({"type": "string", "pattern": r"^a\x01b$"}, r'#: pattern = "\^a\\\\x01b\$"'),
        ({"type": "string", "maxLength": 2**32 + 3}, f"#: maxLength = {2**32 + 3}"),
        ({"type": "array", "items": {}, "minItems": -1}, "#: minItems = -1"),
        ({"type": "integer", "multipleOf": 999983}, "#: multipleOf = 999983"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#: .*minimum = 5.*"),
        ({"type": "string", "pattern": "("}, '#: .*pattern = "[(]"'),
        ({"type": "text"}, '#: type = "text"'),
        ({"anyOf": []}, r"#: anyOf = \[\]"),
        ({"items": {"$ref": "#/$defs/a"}}, '#/items: [$]ref = "#/[$]defs/a"'),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "#: .*minLength = 5.*"),
    ],
)
def test_a_refusal_tells_the_place_and_the_value(rule: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"^json_schema: {said}: "):
        compiled("json_schema", rule)


@pytest.mark.parametrize(
    "values",
    [(1, 1.0), ([1], [1.0]), ({"a": 1, "b": 2}, {"b": 2.0, "a": 1.0}), (0, -0.0), (10**18, 1e18)],
)
def test_equal_values_are_no_alternatives(values: tuple[Any, Any]) -> None:
    with pytest.raises(RequestError, match="oneOf"):
        compiled("json_schema", {"oneOf": [{"const": value} for value in values]})


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e-400", "0.12345678901234567890123"])
def test_a_decimal_that_no_double_holds_is_refused(number: str) -> None:
    with pytest.raises(RequestError, match=f"^json_schema: {number} can't be kept exactly"):
        compiled("json_schema", f'{{"minimum": {number}}}')


@given(text=TEXTS.filter(bool))
def test_choices_and_marks_keep_control_characters(text: str) -> None:
    matcher = compiled("choice", [text]).begin()
    assert all(map(matcher.accept, text.encode()))
    assert matcher.complete
