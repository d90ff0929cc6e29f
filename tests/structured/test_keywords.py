"""Each keyword of JSON Schema's draft 2020-12: what follows it can be written, what doesn't can't,
or the backend refuses the keyword by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dovetail.errors import RequestError
from tests.grammars.helpers import compiled, takes
from tests.structured.formats import validator

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
STRING = {"type": "string"}
INTEGER = {"type": "integer"}

# the keyword, a schema, what follows it, what doesn't
CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("type", {"type": "string"}, ["", "a", "1"], [1, None, [], {}, True]),
    ("type", {"type": "integer"}, [0, -1, 12345678901234567890], [0.5, "1", None, True]),
    ("type", {"type": "number"}, [0, -1.5, 1e30, 2.5e-7], ["1", None, [1]]),
    ("type", {"type": "boolean"}, [True, False], [0, 1, "true", None]),
    ("type", {"type": "null"}, [None], [0, "", False, [], {}]),
    ("type", {"type": "array"}, [[], [1, "a", None, [], {}]], [{}, "[]", 1]),
    ("type", {"type": "object"}, [{}, {"a": {"b": [1]}}, {"a": 1, "b": 2}], [[], "{}", 1]),
    ("type", {"type": ["string", "null"]}, ["a", None], [1, True, []]),
    ("enum", {"enum": ["a", 1, None, True, [1], {"a": 2}]}, ["a", 1, None, True, [1], {"a": 2}], ["b", 2, False, [2], {"a": 1}, []]),
    ("enum", {"type": "string", "enum": ["a", 'say "x"', "b\\c", "é\n"]}, ["a", 'say "x"', "b\\c", "é\n"], ["", "say x", "b", "e"]),
    ("const", {"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, {"a": "x"}, {}]),
    ("const", {"const": False}, [False], [0, None, True]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, [0, 7, -14, 7007], [1, 6, 8, 15]),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, [0, 1.5, 2], [0.25, 1.6]),
    ("minimum", {"type": "integer", "minimum": -3}, [-3, 0, 99], [-4, -100]),
    ("minimum", {"type": "number", "minimum": 1.5}, [1.5, 1.51, 2, 100], [1.49, 0, -1.5]),
    ("maximum", {"type": "integer", "maximum": 120}, [120, 7, -5], [121, 1200]),
    ("maximum", {"type": "number", "maximum": -0.5}, [-0.5, -1, -10.25], [-0.4, 0, 1]),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 9}, [10, 100], [9, 0]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.1, 0.5], [0, 0.6]),
    ("exclusiveMinimum", {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, [0.1, 0.5], [0, 0.6]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 9}, [8, -100], [9, 10]),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 2.5}, [2.49, -1], [2.5, 3]),
    ("exclusiveMaximum", {"type": "number", "minimum": -0.25, "exclusiveMaximum": 0}, [-0.25, -0.1], [0, 1, -0.3]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", "éé", "😀😀"], ["", "a", "😀"]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["", "ab", "é😀"], ["abc"]),
    ("pattern", {"type": "string", "pattern": "^[a-c]{2,3}$"}, ["ab", "ccc"], ["a", "abca", "xab"]),
    ("pattern", {"type": "string", "pattern": "^a(\\.[0-9]+)?$"}, ["a", "a.1", "a.12"], ["a1", "a.", "b"]),
    ("pattern", {"type": "string", "pattern": "^(x|y{1,2})$"}, ["x", "y", "yy"], ["xx", "yyy"]),
    ("pattern", {"type": "string", "pattern": "^[^\\W\\d]$"}, ["a", "_"], ["1", "-"]),
    ("pattern", {"type": "string", "pattern": "(?=a)b"}, [], []),
    ("format", {"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "2023-04-31", "2023-13-01", "1-1-1", "2023-1-01"]),
    ("format", {"type": "string", "format": "time"}, ["12:30:00Z", "23:59:59.5+01:00"], ["24:00:00Z", "12:60:00Z", "12:30:60Z", "12:30:00"]),
    ("format", {"type": "string", "format": "date-time"}, ["2024-02-29T12:30:00Z"], ["2023-02-29T12:30:00Z", "2024-01-01 12:30", "2024-01-01"]),
    ("format", {"type": "string", "format": "duration"}, ["P1D", "PT1H30M", "P2W"], ["P", "1D", "PT", "P1"]),
    ("format", {"type": "string", "format": "email"}, ["a@b.org", "a.b@c.de"], ["a", "@b", "a@", "a b@c"]),
    ("format", {"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    ("format", {"type": "string", "format": "ipv6"}, ["::1", "2001:db8::8:800"], ["1::2::3", "12345::", ":"]),
    ("format", {"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["0123456789abcdef0123456789abcdef", "x"]),
    ("format", {"type": "string", "format": "hostname"}, ["a.example", "x-1"], ["-a", "a..b", "a" * 64, ".".join(["a" * 60] * 5)]),
    ("format", {"type": "string", "format": "uri"}, ["https://example.org/a?b#c"], ["no uri", "//a"]),
    ("format", {"type": "string", "format": "regex"}, [], []),
    ("properties", POINT, [{"x": 1}, {"x": 1, "y": 2}], [{"x": "a"}, {"x": 1, "y": None}]),
    ("properties", {"type": "object", "properties": {"größe": INTEGER, 'q"': INTEGER, "": STRING}, "additionalProperties": False},
     [{"größe": 1, 'q"': 2, "": ""}, {}], [{"größe": ""}, {'q"': ""}, {"": 1}, {"gr": 1}]),
    ("required", POINT, [{"x": 1}], [{}, {"y": 1}]),
    ("required", {"type": "object", "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}, {}]),
    ("additionalProperties", POINT, [{"x": 1}], [{"x": 1, "z": 1}]),
    ("additionalProperties", {"type": "object", "additionalProperties": INTEGER}, [{}, {"a": 1, "b": 2}], [{"a": "b"}]),
    ("additionalProperties", {"type": "object", "properties": {"a": STRING}, "additionalProperties": INTEGER},
     [{"a": "", "b": 1}], [{"a": 1}, {"b": ""}]),
    ("patternProperties", {"type": "object", "patternProperties": {"^n_": INTEGER}, "additionalProperties": False},
     [{"n_a": 1}], [{"n_a": ""}, {"a": 1}]),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ("minProperties", {"type": "object", "minProperties": 2}, [{"a": 1, "b": 2}], [{}, {"a": 1}]),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("dependentRequired", {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}], [{"a": 1}]),
    ("unevaluatedProperties", {**POINT, "additionalProperties": True, "unevaluatedProperties": False, "allOf": [{}]}, [], []),
    ("items", {"type": "array", "items": INTEGER}, [[], [1], [1, 2]], [["a"], [1, None]]),
    ("items", {"type": "array", "prefixItems": [STRING], "items": False}, [["a"]], [["a", 1], [1]]),
    ("prefixItems", {"type": "array", "prefixItems": [STRING, INTEGER], "items": STRING, "minItems": 2},
     [["a", 1], ["a", 1, "b"]], [[1, "a"], ["a", 1, 2], ["a"]]),
    ("minItems", {"type": "array", "items": INTEGER, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ("maxItems", {"type": "array", "items": INTEGER, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ("uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    ("contains", {"type": "array", "contains": INTEGER}, [[1], ["a", 1]], [[], ["a"]]),
    ("minContains", {"type": "array", "contains": INTEGER, "minContains": 2}, [[1, 1]], [[1]]),
    ("maxContains", {"type": "array", "contains": INTEGER, "maxContains": 1}, [[1]], [[1, 1]]),
    ("unevaluatedItems", {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 5}]}, [2, 5], [1, 6, "a"]),
    ("allOf", {"allOf": [POINT]}, [{"x": 1}], [{}, {"z": 1}]),
    ("anyOf", {"anyOf": [INTEGER, {"type": "string", "maxLength": 2}]}, [1, "ab"], ["abc", None]),
    ("anyOf", {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": 1}, {"b": 1}], [{}]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, []]),
    ("oneOf", {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]}, [6, -1], [0, 3, 5]),
    ("not", {"type": "integer", "not": {"const": 3}}, [1], [3]),
    ("if", {"if": {"type": "integer"}, "then": {"minimum": 0}, "else": STRING}, [1, "a"], [-1, None]),
    ("$ref", {"$ref": "#/$defs/point", "$defs": {"point": POINT}}, [{"x": 1}], [{}, 1]),
    ("$ref", {"type": "array", "items": {"$ref": "#"}}, [[], [[]], [[], [[]]]], [[1], {}]),
    ("$ref", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INTEGER}}, [1], ["a"]),
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 3}, [3], [2, "a"]),
    ("$anchor", {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}, [1], ["a"]),
    ("$id", {"$ref": "other", "$defs": {"a": {"$id": "other", "type": "integer"}}}, [1], ["a"]),
    ("$dynamicRef", {"$dynamicRef": "#n", "$defs": {"a": {"$dynamicAnchor": "n", "type": "integer"}}}, [1], ["a"]),
    ("title", {"title": "A", "description": "b", "default": 1, "examples": ["x"], "readOnly": True, "$comment": "c", "type": "integer"},
     [1], ["a"]),
    ("contentEncoding", {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}, ["YQ=="], [1]),
]  # fmt: skip

OTHER_WORDS = {  # by which a refusal names what it refuses as well
    "pattern": ("lookarounds", "look-around"),
    "exclusiveMinimum": ("allOf",),
    "unevaluatedProperties": ("allOf",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "$anchor": ("#here",),
    "$id": ("other",),
}


@pytest.mark.parametrize(
    "number",
    range(len(CASES)),
    ids=[f"{keyword}-{number}" for number, (keyword, *_) in enumerate(CASES)],
)
def test_a_keyword_is_followed_or_refused_by_name(number: int) -> None:
    keyword, rule, right, wrong = CASES[number]
    judge = validator(rule)
    assert all(judge.is_valid(value) for value in right), "the case itself is right"
    assert not any(judge.is_valid(value) for value in wrong)
    try:
        grammar = compiled("json_schema", rule)
    except RequestError as error:
        said = str(error)
        if not any(word in said for word in (keyword, *OTHER_WORDS.get(keyword, ()))):
            raise
        return
    assert right, "what can't be followed is refused"
    text = {
        json.dumps(value, separators=(",", ":"), ensure_ascii=False): value
        for value in (*right, *wrong)
    }
    taken = [value for written, value in text.items() if takes(grammar, written)]
    assert [value for value in taken if value in wrong and value not in right] == []
    assert [
        value
        for value in right
        if not any(value == other and type(value) is type(other) for other in taken)
    ] == []
