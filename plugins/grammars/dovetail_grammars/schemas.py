"""Checks of JSON Schemas: `checked_parts` reports place, keyword and value of anything malformed,
and normalizes what the library interprets differently or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dovetail.api.grammar import GrammarSpec
from dovetail_grammars.specs import Json, refuse, target

_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_OF_31_DAYS = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])"
_OF_30_DAYS = r"(0[469]|11)-(0[1-9]|[12]\d|30)"
_FEBRUARY = r"02-(0[1-9]|1\d|2[0-8])"
_DATE = rf"(\d{{4}}-({_OF_31_DAYS}|{_OF_30_DAYS}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,60}[a-zA-Z0-9])?"
_HOST = rf"({_LABEL}\.){{0,3}}{_LABEL}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"

# Of string formats that the library checks too loosely
PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",  # with the number of days of each month
    "time": f"^{_TIME}$",  # without second 60, allowed only in the last minute of a day
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": f"^{_HOST}$",  # at most 253 characters, labels of at most 63
    "email": rf"^{_ATOM}(\.{_ATOM})*@{_HOST}$",  # with such a hostname
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",  # without leading zeros
}


Schema = dict[str, Any]

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
EXCLUSIVE_BOUNDS = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
BOUNDS = EXCLUSIVE_BOUNDS | {"minimum", "maximum"}
COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
MAX_COUNT = 2**31 - 1  # above, the library overflows
UNSUPPORTED = frozenset(  # keywords that affect validity, and that the library would ignore
    {"$dynamicRef", "$recursiveRef", "contains", "minContains", "maxContains", "uniqueItems"}
    | {"unevaluatedItems", "unevaluatedProperties", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "not", "if", "then", "else"}
)
# supported by the library
FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_STANDARD_FORMATS = FORMATS | {  # JSON Schema ignores any other
    *(
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "iri",
        "iri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ),
}
_ONE_SCHEMA = ("items", "additionalItems", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties")


@dataclass(frozen=True, slots=True)
class Subschema:
    """A schema nested in another."""

    place: str  # as a `$ref`
    schema: Schema
    root: Schema  # root document of its `$ref`s

    def refuse(self, spec: GrammarSpec, key: str, why: str, value: Json = None) -> NoReturn:
        """Raise `RequestError` that shows the keyword `key` and its value, or `value` within it."""
        refuse(
            spec, f"{self.place}: {shown(key, self.schema[key] if value is None else value)}: {why}"
        )


def shown(key: str, value: Json) -> str:
    """Format a keyword and its value as the user wrote them."""
    text = json.dumps(value, ensure_ascii=False)
    return f"{key} = {text if len(text) <= 80 else f'{text[:77]}...'}"


def checked_parts(spec: GrammarSpec, root: Schema, place: str = "#") -> list[Subschema]:
    """Return each schema that an answer can reach: `root`, its subschemas, and the targets of
    `$ref`s.

    They are modified in place: keywords without effect are removed, as are formats that JSON Schema
    doesn't define. Raises `RequestError` for a keyword with a malformed value, and for a `$ref`
    that isn't a JSON pointer.
    """
    parts: list[Subschema] = []
    seen: set[int] = set()
    rest: list[tuple[str, Json, Schema]] = [(place, root, root)]
    while rest:
        where, schema, base = rest.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        if not isinstance(schema, dict):
            refuse(
                spec, f"{where}: a schema is an object or a boolean, got {json.dumps(schema)[:80]}"
            )
        seen.add(id(schema))
        part = Subschema(where, schema, schema if isinstance(schema.get("$id"), str) else base)
        _settle(schema)
        _check_forms(spec, part)
        parts.append(part)
        rest += reversed(list(_within(spec, part, place)))
    return parts


def refuse_others(spec: GrammarSpec, part: Subschema) -> None:
    """Raise `RequestError` for the first keyword or format that the library doesn't support."""
    for key in part.schema:
        if key in UNSUPPORTED:
            part.refuse(spec, key, "the backend llguidance doesn't support this keyword")
    if part.schema.get("format", "uri") not in FORMATS:
        part.refuse(spec, "format", "the backend llguidance doesn't support this format")


def literals(value: Json) -> Iterator[Json]:
    """Yield the numbers and strings within a value of `const` or `enum`, except keys."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield value


def _settle(schema: Schema) -> None:
    for bound in ("Minimum", "Maximum"):  # up to draft 4: a boolean besides the bound
        exclusive = schema.get(f"exclusive{bound}")
        if isinstance(exclusive, bool):
            del schema[f"exclusive{bound}"]
            if exclusive and bound.lower() in schema:
                schema[f"exclusive{bound}"] = schema.pop(bound.lower())
    for key in COUNTS:
        if isinstance(value := schema.get(key), float) and value.is_integer():
            schema[key] = int(value)
    for key in [key for key in schema if _says_nothing(schema, key)]:
        del schema[key]


def _says_nothing(schema: Schema, key: str) -> bool:
    value = schema[key]
    if key == "uniqueItems":
        return value is False
    if key in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        return value is True or value == {}
    if key == "$schema":  # of a dialect that no library supports
        return "json-schema.org/" not in str(value)
    if key == "format" and isinstance(value, str):
        kinds = schema.get("type", "string")
        return value not in _STANDARD_FORMATS or "string" not in (
            kinds if isinstance(kinds, list) else (kinds,)
        )
    return False


def _check_forms(spec: GrammarSpec, part: Subschema) -> None:
    for key, value in part.schema.items():
        if (form := _FORMS.get(key)) is not None and not form[0](value):
            part.refuse(spec, key, f"it must be {form[1]}")


def _within(spec: GrammarSpec, part: Subschema, place: str) -> Iterator[tuple[str, Json, Schema]]:
    schema = part.schema
    for key in _ONE_SCHEMA:
        if key in schema and not isinstance(schema[key], list):
            yield f"{part.place}/{key}", schema[key], part.root
    for key in (*_LISTS, "items"):  # up to draft 2019-09, items may be lists
        if isinstance(schema.get(key), list):
            yield from (
                (f"{part.place}/{key}/{index}", one, part.root)
                for index, one in enumerate(schema[key])
            )
    for key in _NAMED:
        for name, one in schema.get(key, {}).items():
            yield f"{part.place}/{key}/{name.replace('~', '~0').replace('/', '~1')}", one, part.root
    if "$ref" in schema:
        reference = schema["$ref"]
        if reference != "#" and not reference.startswith("#/"):
            part.refuse(spec, "$ref", "only JSON pointers are supported, like #/$defs/name")
        if (found := target(part.root, reference)) is None:
            part.refuse(spec, "$ref", "it leads nowhere")
        yield f"{place}{reference[1:]}", found, part.root


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_type(value: Json) -> bool:
    return (
        value in TYPES
        if isinstance(value, str)
        else isinstance(value, list) and bool(value) and all(one in TYPES for one in value)
    )


_FORMS: Mapping[str, tuple[Callable[[Json], bool], str]] = {
    **dict.fromkeys(
        COUNTS,
        (
            lambda value: type(value) is int and 0 <= value <= MAX_COUNT,
            f"a whole number from 0 to {MAX_COUNT}",
        ),
    ),
    **dict.fromkeys((*BOUNDS, "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(
        ("pattern", "format", "$ref"), (lambda value: isinstance(value, str), "a string")
    ),
    **dict.fromkeys(
        ("anyOf", "oneOf", "allOf"),
        (lambda value: isinstance(value, list) and bool(value), "a list of one schema or more"),
    ),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of one value or more"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of strings",
    ),
    **dict.fromkeys(_NAMED, (lambda value: isinstance(value, dict), "an object of schemas")),
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of these"),
}
