"""The part of JSON Schema that XGrammar supports. It silently ignores the rest, so everything else is rejected here by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from dovetail.api.grammar import GrammarSpec
from dovetail.checks import INT64
from dovetail_grammars.regexes import IN_JSON, rewritten
from dovetail_grammars.schemas import (
    ASSERTIONS,
    BOUNDS,
    EXCLUSIVE_BOUNDS,
    PATTERNS,
    Schema,
    Subschema,
    checked_parts,
    literals,
    refuse_others,
    shown,
)
from dovetail_grammars.specs import refuse

DONE: Mapping[str, frozenset[str]] = {  # by the keyword or type that takes precedence
    "$ref": frozenset({"$ref"}),
    "const": frozenset({"const", "type"}),
    "enum": frozenset({"enum", "type"}),
    "anyOf": frozenset({"anyOf"}),
    "oneOf": frozenset({"oneOf"}),
    "allOf": frozenset({"allOf"}),
    "integer": frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "string": frozenset({"type", "format", "pattern", "minLength", "maxLength"}),
    "boolean": frozenset({"type"}),
    "null": frozenset({"type"}),
    "array": frozenset({"type", "prefixItems", "items", "minItems", "maxItems"}),
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
}
_DONE_SOMEWHERE = frozenset().union(*DONE.values())
DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_PLAIN_NAME = re.compile(r"[ !#-\[\]-~]*")
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def done_in_full(spec: GrammarSpec, schema: Schema, place: str = "#") -> Schema:
    """Return the schema for XGrammar, with patterns and lengths rewritten. Raises `RequestError` that names an unsupported keyword and its place."""
    parts = checked_parts(spec, schema, place)
    for part in parts:
        refuse_others(spec, part, _DONE_SOMEWHERE, "xgrammar")
        _refuse_rounded(spec, part)
    used = {id(part.schema) for part in parts}
    definitions = {
        key: {
            name: _checked(spec, one, f"{place}/{key}/{name}")
            for name, one in schema[key].items()
            if id(one) in used
        }
        for key in ("$defs", "definitions")
        if isinstance(schema.get(key), dict)
    }
    return {**_checked(spec, schema, place), **definitions}


def _refuse_rounded(spec: GrammarSpec, part: Subschema) -> None:
    """Reject numbers that the library would round: integers have 64 bits; other bounds are doubles with six digits after the decimal point."""
    inexact = "the backend xgrammar can't keep this number exactly"
    for key, values in (
        ("const", [part.schema.get("const")]),
        ("enum", part.schema.get("enum", ())),
    ):
        for value in literals(list(values)):
            if isinstance(value, int) and not INT64[0] <= value <= INT64[1]:
                part.refuse(spec, key, inexact, value)
    for key in BOUNDS & part.schema.keys():
        value, types = part.schema[key], _types(part.schema)
        whole = "integer" not in types or value == int(value)
        if not (
            INT64[0] <= value <= INT64[1]
            and whole
            and ("number" not in types or float(value) == value == round(value, 6))
        ):
            part.refuse(spec, key, inexact)
    bounds = product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    for low, high in (*bounds, ("minLength", "maxLength"), ("minItems", "maxItems")):
        if low in part.schema and high in part.schema:
            least, most = part.schema[low], part.schema[high]
            if least > most or (least == most and not EXCLUSIVE_BOUNDS.isdisjoint((low, high))):
                part.refuse(spec, low, f"no value satisfies it and {shown(high, most)}")


def _checked(spec: GrammarSpec, schema: Any, place: str) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):  # `items` of old drafts
        refuse(spec, f"{place}: the backend xgrammar doesn't support a list of schemas here")
    deciding = next((key for key in DECIDING if key in schema), None)
    kinds = [deciding] if deciding else _types(schema)
    done = frozenset().union(*(DONE[kind] for kind in kinds))
    for key in schema:
        if key in ASSERTIONS and key not in done:
            beside = f" beside {kinds[0]}" if kinds else " without a type"
            refuse(
                spec, f"{place}: the backend xgrammar doesn't support {key}{beside}; try llguidance"
            )
    _check_values(spec, schema, deciding, place)
    left_out = ("minLength", "maxLength", *(["format"] if schema.get("format") in PATTERNS else ()))
    rest = {key: value for key, value in schema.items() if key not in left_out}
    return {**rest, **_inner(spec, schema, place)}


def _types(schema: Schema) -> list[str]:
    """Return the types that the schema's keywords apply to; objects and arrays may be implied."""
    if "type" not in schema:
        if "properties" in schema or "additionalProperties" in schema:
            return ["object"]
        return ["array"] if "items" in schema or "prefixItems" in schema else []
    return schema["type"] if isinstance(schema["type"], list) else [schema["type"]]


def _check_values(spec: GrammarSpec, schema: Schema, deciding: str | None, place: str) -> None:
    """Check the values of keywords that XGrammar supports only in part."""
    if deciding == "$ref" and not re.fullmatch(
        r"#(/(\$defs|definitions)/[^/~%]+)?", str(schema["$ref"])
    ):
        refuse(
            spec,
            f"{place}: the backend xgrammar supports $refs to # and into $defs, not to {schema['$ref']!r}",
        )
    if deciding in ("const", "enum") and "type" in schema:
        types = tuple(kind for name in _types(schema) for kind in TYPES[name])
        if not all(
            type(value) in types
            for value in ([schema["const"]] if deciding == "const" else schema["enum"])
        ):
            refuse(spec, f"{place}: some values of {deciding} don't have the given type")
    if deciding == "oneOf" and not _disjoint(schema["oneOf"]):
        refuse(
            spec,
            f"{place}: the backend xgrammar supports oneOf only if each part has its own type or const; try anyOf",
        )
    if deciding == "allOf" and len(schema["allOf"]) > 1:
        refuse(
            spec,
            f"{place}: the backend xgrammar doesn't support allOf of several schemas; try llguidance",
        )
    names = schema.get("properties", {})
    if unnamed := [name for name in schema.get("required", ()) if name not in names]:
        refuse(
            spec,
            f"{place}: the backend xgrammar doesn't support required for {unnamed[0]!r}, which isn't among the properties; try llguidance",
        )
    if schema.get("additionalProperties") is not False and (
        odd := [name for name in names if not _PLAIN_NAME.fullmatch(name)]
    ):
        refuse(
            spec,
            f"{place}: the backend xgrammar doesn't support additionalProperties with {odd[0]!r}: set it to false, or use plain ASCII names",
        )
    rules = [key for key in ("format", "pattern", "minLength", "maxLength") if key in schema]
    if len(rules) > 1 and rules != ["minLength", "maxLength"]:
        refuse(
            spec,
            f"{place}: the backend xgrammar doesn't support {rules[1]} with {rules[0]}; try llguidance",
        )


def _disjoint(parts: list[Any]) -> bool:
    if not all(isinstance(part, dict) for part in parts):
        return False
    types = [part.get("type") for part in parts]
    consts = [_as_equal(part.get("const")) for part in parts]
    by_type = (
        all(isinstance(name, str) for name in types)
        and len(set(types)) == len(types)
        and not {"integer", "number"} <= set(types)
    )
    return by_type or (all("const" in part for part in parts) and len(set(consts)) == len(consts))


def _as_equal(value: Any) -> str:
    """Return a value's JSON, the same for all values that are equal in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(_as_equal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_as_equal(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


def _inner(spec: GrammarSpec, schema: Schema, place: str) -> Schema:
    """Return the keywords whose values hold schemas, checked, and the string's pattern, rewritten. Lengths become a pattern, too, since XGrammar
    would allow control characters in such strings, which JSON doesn't."""
    inner: Schema = {}
    for key, part, where in _schemas_in(schema, place):
        inner[key] = _checked(spec, part, where)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if key in schema:
            inner[key] = [
                _checked(spec, part, f"{place}/{key}/{index}")
                for index, part in enumerate(schema[key])
            ]
    if "properties" in schema:
        inner["properties"] = {
            name: _checked(spec, part, f"{place}/properties/{name}")
            for name, part in schema["properties"].items()
        }
    if (pattern := PATTERNS.get(schema.get("format", ""), schema.get("pattern"))) is not None:
        inner["pattern"] = rewritten(
            spec, pattern, IN_JSON, f"{place}: {shown('pattern', pattern)}: "
        )
    if "minLength" in schema or "maxLength" in schema:
        inner["pattern"] = rewritten(
            spec, f"(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}", IN_JSON
        )
    return inner


def _schemas_in(schema: Schema, place: str) -> Iterator[tuple[str, Any, str]]:
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield key, schema[key], f"{place}/{key}"
