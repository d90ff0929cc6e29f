"""The part of JSON Schema that XGrammar does. It passes over the rest in silence, so that whatever isn't known to be done is refused here by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.api.grammar import GrammarSpec
from dovetail_grammars.formats import PATTERNS
from dovetail_grammars.regexes import IN_JSON, rewritten
from dovetail_grammars.specs import refuse

Schema = dict[str, Any]

DONE: Mapping[str, frozenset[str]] = {  # by the keyword, or the type, that decides over the others
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
DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
ASSERTIONS = frozenset().union(*DONE.values()) | {  # other keywords have no say in what is valid
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems", "unevaluatedItems"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
}
FORMATS = frozenset({"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
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


def done_in_full(spec: GrammarSpec, schema: Schema) -> Schema:
    """Return the schema as XGrammar is to get it: patterns and lengths rewritten. Raises `RequestError` that names a keyword, and where it stands."""
    return {**_checked(spec, schema, "#"), **_definitions(spec, schema)}


def _definitions(spec: GrammarSpec, root: Schema) -> Schema:
    found = {}
    for key in ("$defs", "definitions"):
        if isinstance(root.get(key), dict):
            found[key] = {name: _checked(spec, schema, f"#/{key}/{name}") for name, schema in root[key].items()}
    return found


def _checked(spec: GrammarSpec, schema: Any, place: str) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        refuse(spec, f"{place}: a schema is an object or a boolean")
    deciding = next((key for key in DECIDING if key in schema), None)
    kinds = [deciding] if deciding else _types(spec, schema, place)
    done = frozenset().union(*(DONE[kind] for kind in kinds))
    for key in schema:
        if key in ASSERTIONS and key not in done and not _says_nothing(key, schema[key]):
            beside = f" beside {kinds[0]}" if kinds else " without a type"
            refuse(spec, f"{place}: the backend xgrammar can't do {key}{beside}; llguidance may")
    _check_values(spec, schema, deciding, place)
    left_out = ("minLength", "maxLength", *(["format"] if schema.get("format") in PATTERNS else ()))
    rest = {key: value for key, value in schema.items() if key not in left_out}
    return {**rest, **_inner(spec, schema, place)}


def _says_nothing(key: str, value: Any) -> bool:
    return (key, value) in (("uniqueItems", False), ("unevaluatedProperties", True), ("unevaluatedItems", True))


def _types(spec: GrammarSpec, schema: Schema, place: str) -> list[str]:
    """Return the types that the rest of the schema is about; an object or an array may go without saying."""
    if "type" not in schema:
        if "properties" in schema or "additionalProperties" in schema:
            return ["object"]
        return ["array"] if "items" in schema or "prefixItems" in schema else []
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in types:
        if not isinstance(name, str) or name not in TYPES:
            refuse(spec, f"{place}: unknown type {name!r}")
    return types


def _check_values(spec: GrammarSpec, schema: Schema, deciding: str | None, place: str) -> None:
    """Look at the values of keywords of which XGrammar does only a part."""
    if deciding == "$ref" and not re.fullmatch(r"#(/(\$defs|definitions)/[^/~%]+)?", str(schema["$ref"])):
        refuse(spec, f"{place}: the backend xgrammar follows $refs to # and into $defs, not to {schema['$ref']!r}")
    if deciding in ("const", "enum") and "type" in schema:
        types = tuple(kind for name in _types(spec, schema, place) for kind in TYPES[name])
        values = [schema["const"]] if deciding == "const" else schema["enum"]
        if not isinstance(values, list) or not all(type(value) in types for value in values):
            refuse(spec, f"{place}: the values of {deciding} aren't all of the type beside it")
    if deciding == "oneOf" and not _disjoint(schema["oneOf"]):
        refuse(spec, f"{place}: the backend xgrammar can't do oneOf, unless each part has a type or a const of its own; anyOf may serve")
    if deciding == "allOf" and not (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1):
        refuse(spec, f"{place}: the backend xgrammar can't do allOf of several schemas; llguidance may")
    names = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    if unnamed := [name for name in schema.get("required", ()) if name not in names]:
        refuse(spec, f"{place}: the backend xgrammar can't do required for {unnamed[0]!r}, which isn't among the properties; llguidance may")
    if schema.get("additionalProperties") is not False and (odd := [name for name in names if not _PLAIN_NAME.fullmatch(name)]):
        refuse(spec, f"{place}: the backend xgrammar can't do additionalProperties beside {odd[0]!r}: say false, or use plain ASCII names")
    if "format" in schema and schema["format"] not in FORMATS:
        refuse(spec, f"{place}: the backend xgrammar doesn't know the format {schema['format']!r}")
    rules = [key for key in ("format", "pattern", "minLength", "maxLength") if key in schema]
    if len(rules) > 1 and rules != ["minLength", "maxLength"]:
        refuse(spec, f"{place}: the backend xgrammar can't do {rules[1]} beside {rules[0]}; llguidance may")


def _disjoint(parts: Any) -> bool:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return False
    types = [part.get("type") for part in parts]
    consts = [repr(part.get("const")) for part in parts]
    by_type = all(isinstance(name, str) for name in types) and len(set(types)) == len(types) and not {"integer", "number"} <= set(types)
    return by_type or (all("const" in part for part in parts) and len(set(consts)) == len(consts))


def _inner(spec: GrammarSpec, schema: Schema, place: str) -> Schema:
    """Return the keywords whose values hold schemas, checked, and the string's pattern, rewritten; lengths become one, since XGrammar would have
    control characters in such strings, which JSON hasn't."""
    inner: Schema = {}
    for key, part, where in _schemas_in(schema, place):
        inner[key] = _checked(spec, part, where)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            inner[key] = [_checked(spec, part, f"{place}/{key}/{index}") for index, part in enumerate(schema[key])]
    if isinstance(schema.get("properties"), dict):
        inner["properties"] = {name: _checked(spec, part, f"{place}/properties/{name}") for name, part in schema["properties"].items()}
    if schema.get("format") in PATTERNS:
        inner["pattern"] = rewritten(spec, PATTERNS[schema["format"]], IN_JSON)
    if isinstance(schema.get("pattern"), str):
        inner["pattern"] = rewritten(spec, schema["pattern"], IN_JSON)
    if "minLength" in schema or "maxLength" in schema:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if not all(type(length) is int and length >= 0 for length in (least, most or 0)):
            refuse(spec, f"{place}: minLength and maxLength are integers of 0 or more")
        inner["pattern"] = rewritten(spec, f"(?s:.){{{least},{most}}}", IN_JSON)
    return inner


def _schemas_in(schema: Schema, place: str) -> Iterator[tuple[str, Any, str]]:
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield key, schema[key], f"{place}/{key}"
