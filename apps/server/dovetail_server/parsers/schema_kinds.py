"""`Parameters`: how formats without quotes read a parameter's value, by the JSON Schemas of a
request's tools. Schemas come from the client: anything that isn't a schema is ignored, and each
part of one is read once, however many references lead to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dovetail_server.parsers.pieces import MAX_SPACE

_DEEPEST = 8  # nested alternatives and references
CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
}  # of Python, which some models write -> of JSON
_IN_PYTHON = {written: python for python, written in CONSTANTS.items()}
_IMPLIED = {  # keywords that say what a value is where its type isn't given
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "propertyNames",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": (
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "contentEncoding",
        "contentMediaType",
    ),
}


class _Value(NamedTuple):
    """A value that a schema accepts. `constant`: as JSON; None: any value of the kind."""

    kind: str
    constant: str | None = None


_Accepted = frozenset[_Value] | None  # None: the schema doesn't say
_OF_TYPE = {
    **{kind: frozenset((_Value(kind),)) for kind in ("string", "number", "object", "array")},
    "integer": frozenset((_Value("number"),)),
    "boolean": frozenset((_Value("boolean", "true"), _Value("boolean", "false"))),
    "null": frozenset((_Value("null", "null"),)),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """How a parameter's text is read."""

    is_text: bool  # it is a string, unless it is one of `constants`; False: it is JSON
    constants: Mapping[str, str] = field(default_factory=dict)  # text -> JSON

    def may_be_constant(self, beginning: str) -> bool:
        """Return True if a text with this beginning may be one of the constants."""
        begun = beginning.strip()
        near = len(beginning) - len(begun) <= MAX_SPACE
        return near and any(constant.startswith(begun) for constant in self.constants)


_TEXT = Reading(is_text=True)


class Parameters:
    """How the parameters of all functions are read. An unknown parameter is a string."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}  # by function
        for tool in tools:
            function = _mapping(_mapping(tool).get("function", tool))
            self._schemas[str(function.get("name"))] = _mapping(function.get("parameters"))
        self._readings: dict[tuple[str, str], Reading] = {}
        self._known: dict[int, _Accepted] = {}  # by the id of a schema's part

    def reading(self, function: str, parameter: str) -> Reading:
        """Return how the parameter's value is read."""
        if not self.has(function, parameter) and "additionalProperties" not in self._schemas.get(
            function, {}
        ):
            return _TEXT
        found = self._readings.get((function, parameter))
        if found is None:
            root = self._schemas[function]
            schema = _mapping(root.get("properties")).get(
                parameter, root.get("additionalProperties")
            )
            found = self._readings[function, parameter] = _reading(
                self._accepted(schema, root, _DEEPEST)
            )
        return found

    def has(self, function: str, parameter: str) -> bool:
        """Return True if the function's schema names the parameter."""
        return parameter in _mapping(self._schemas.get(function, {}).get("properties"))

    def _accepted(self, value: Any, root: Mapping[str, Any], depth: int) -> _Accepted:
        if not isinstance(value, Mapping) or depth == 0:
            return None
        key = id(value)
        if key not in self._known:
            self._known[key] = frozenset()  # what a reference to itself adds
            self._known[key] = self._found(value, root, depth)
        return self._known[key]

    def _found(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> _Accepted:
        accepted = _both(_of_types(schema.get("type")), _of_constants(schema))
        if isinstance(reference := schema.get("$ref"), str):
            accepted = _both(accepted, self._accepted(_referred(reference, root), root, depth - 1))
        for word in ("anyOf", "oneOf"):
            if isinstance(several := schema.get(word), list) and several:
                accepted = _both(
                    accepted, _any([self._accepted(one, root, depth - 1) for one in several])
                )
        if isinstance(several := schema.get("allOf"), list):
            for one in several:
                accepted = _both(accepted, self._accepted(one, root, depth - 1))
        return _implied(schema) if accepted is None else accepted


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _of_types(kinds: Any) -> _Accepted:
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        return None
    return _any([_OF_TYPE.get(kind) if isinstance(kind, str) else None for kind in kinds])


def _of_constants(schema: Mapping[str, Any]) -> _Accepted:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_constant, values)) if isinstance(values, list) and values else None


def _constant(value: Any) -> _Value:
    match value:
        case str():
            return _Value("string", value)
        case bool() | None:
            return _Value("null" if value is None else "boolean", json.dumps(value))
        case int() | float():
            return _Value("number", json.dumps(value))
    return _Value("object" if isinstance(value, Mapping) else "array")


def _implied(schema: Mapping[str, Any]) -> _Accepted:
    kinds = [kind for kind, words in _IMPLIED.items() if any(word in schema for word in words)]
    return _any([_OF_TYPE[kind] for kind in kinds]) if kinds else None


def _any(several: Sequence[_Accepted]) -> _Accepted:
    return (
        None if None in several else frozenset().union(*(one for one in several if one is not None))
    )


def _both(one: _Accepted, other: _Accepted) -> _Accepted:
    if one is None or other is None:
        return other if one is None else one
    return _within(one, other) | _within(other, one)


def _within(one: frozenset[_Value], other: frozenset[_Value]) -> frozenset[_Value]:
    return frozenset(value for value in one if value in other or _Value(value.kind) in other)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        value = _mapping(value).get(name)
    return value


def _reading(accepted: _Accepted) -> Reading:
    if not accepted:
        return _TEXT
    texts = {value.constant for value in accepted if value.kind == "string"}
    if not texts:
        return Reading(is_text=False)
    constants: dict[str, str] = {}
    for value in accepted:
        if value.kind == "string" or value.constant is None or value.constant in texts:
            continue
        constants[value.constant] = value.constant
        if (other := _IN_PYTHON.get(value.constant, value.constant)) not in texts:
            constants[other] = value.constant
    return Reading(is_text=True, constants=constants)
