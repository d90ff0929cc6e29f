"""Parses specs: bounded JSON, choices, structural tags, and loops of references, which the library
doesn't detect.

Checks users' Lark grammars: the library extends the syntax in ways that would break the contract.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote

from dovetail.api.grammar import GrammarSpec
from dovetail.errors import RequestError
from dovetail.request.structured import exact_float

MAX_NESTING = 100  # levels of JSON: the library parses it recursively
MAX_REASON = 300  # characters of a library's explanation

Json = Any
_FLAGS = ("at_least_one", "stop_after_first")
# strings, regular expressions, comments
NOT_SYNTAX = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*')
_SPECIAL_TOKEN = re.compile(r"<[^\s<>]*>")
_ATTRIBUTE = re.compile(r"[\[,]\s*(stop|temperature|max_tokens)\b")


def refuse(spec: GrammarSpec, why: str) -> NoReturn:
    raise RequestError(f"{spec.kind}: {why[:MAX_REASON]}")


def decoder(spec: GrammarSpec) -> json.JSONDecoder:
    """Return a strict JSON decoder that also rejects numbers that would be rounded."""

    def read(text: str) -> float:
        try:
            return exact_float(text)
        except ValueError as error:
            refuse(spec, str(error))

    return json.JSONDecoder(
        parse_constant=lambda name: refuse(spec, f"{name} isn't JSON"), parse_float=read
    )


def read_json(spec: GrammarSpec) -> Json:
    """Return the JSON of a spec's text.

    Raises `RequestError` for text that isn't JSON, or is nested too deeply.
    """
    too_deep = f"its JSON is nested more than MAX_NESTING = {MAX_NESTING} levels deep"
    try:
        value = decoder(spec).decode(spec.text)
    except RecursionError:
        refuse(spec, too_deep)
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        refuse(spec, f"it isn't JSON: {error}")
    level = [value]
    for _ in range(MAX_NESTING):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    refuse(spec, too_deep)


def _inside(value: Json) -> Iterator[Json]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def read_schema(spec: GrammarSpec, schema: Json) -> dict[str, Json]:
    """Return a JSON Schema as a mapping.

    Raises `RequestError` if it isn't a schema, if no value satisfies it, or if its `$ref`s are
    circular.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        refuse(
            spec,
            "the schema is false, which no value satisfies"
            if schema is False
            else "a schema is an object or true",
        )
    if "x-guidance" in schema:
        refuse(spec, "x-guidance: options of the backend are set in engine.yaml")
    _refuse_loops(spec, schema)
    return schema


def _refuse_loops(spec: GrammarSpec, schema: Mapping[str, Json]) -> None:
    """Reject references that lead back to themselves without an object or array in between: they
    describe no text at all."""
    known: set[str] = set()
    for reference in _references(schema):
        path: list[str] = []
        _follow(spec, schema, reference, path, known)


def _references(value: Json) -> Iterator[str]:
    """Yield each `$ref` within the document."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict) and isinstance(value.get("$ref"), str):
            yield value["$ref"]
        rest.extend(_inside(value))


def _follow(
    spec: GrammarSpec, root: Mapping[str, Json], reference: str, path: list[str], known: set[str]
) -> None:
    """Visit the references that `reference`'s target must satisfy, too: `$ref` and `allOf`. Each is
    visited once."""
    if reference in path:
        refuse(
            spec,
            f"its $refs are circular: {' -> '.join([*path[path.index(reference) :], reference])}",
        )
    if reference in known or len(path) > MAX_NESTING:
        return
    known.add(reference)
    path.append(reference)
    for further in _must_follow(target(root, reference)):
        _follow(spec, root, further, path, known)
    path.pop()


def _must_follow(schema: Json) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield from _must_follow(part)


def target(root: Json, reference: str) -> Json:
    """Return the target of a JSON pointer; None if it has none, or is another kind of reference,
    which is left to the library."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(part)
        elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        else:
            return None
    return target


def read_choices(spec: GrammarSpec) -> list[str]:
    """Return the distinct strings of a choice.

    Raises `RequestError` if it is empty, or a string isn't valid Unicode.
    """
    choices = read_json(spec)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) for choice in choices)
    ):
        refuse(spec, "expected a list of one string or more")
    for choice in choices:
        try:
            choice.encode()
        except UnicodeEncodeError:
            refuse(spec, f"{choice!r} can't be written in UTF-8")
    return list(dict.fromkeys(choices))


@dataclass(frozen=True, slots=True)
class Structure:
    """Part of a structural tag: `begin`, then JSON that satisfies `schema`, then `end`."""

    trigger: str  # prefix of `begin` that starts the structure
    begin: str
    schema: dict[str, Json]
    end: str
    place: str  # of the schema, for error messages


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Parsed structural tag.

    `at_least_one`: the answer begins with a structure. `stop_after_first`: it ends after the first.
    `separator`: the text between structures, if there is no other text.
    """

    structures: list[Structure]
    at_least_one: bool
    stop_after_first: bool
    separator: str | None


def read_structural_tag(spec: GrammarSpec) -> StructuralTag:
    """Parse a structural tag.

    Raises `RequestError` if its JSON has another form, or a structure begins with no trigger.
    """
    tag = read_json(spec)
    if not isinstance(tag, dict) or not {"structures", "triggers"} <= set(tag) <= {
        "structures",
        "triggers",
        *_FLAGS,
        "separator",
    }:
        refuse(
            spec,
            f'expected {{"structures": [...], "triggers": [...]}}, '
            f"optionally with {', '.join(_FLAGS)} and separator",
        )
    for flag in _FLAGS:
        if not isinstance(tag.get(flag, False), bool):
            refuse(spec, f"{flag}: expected true or false")
    if not isinstance(tag.get("separator", ""), str):
        refuse(spec, "separator: expected a string")
    flags = {flag: tag.get(flag, False) for flag in _FLAGS}
    return StructuralTag(_read_structures(spec, tag), **flags, separator=tag.get("separator"))


def _read_structures(spec: GrammarSpec, tag: Mapping[str, Json]) -> list[Structure]:
    triggers = tag["triggers"]
    structures = tag["structures"]
    listed = triggers if isinstance(triggers, list) else []
    if not listed or not all(isinstance(trigger, str) and trigger for trigger in listed):
        refuse(spec, "triggers: expected a list of one string or more, none of them empty")
    if not isinstance(structures, list) or not structures:
        refuse(spec, "structures: expected a non-empty list")
    shortest = [
        trigger
        for trigger in dict.fromkeys(triggers)
        if not any(trigger != other and trigger.startswith(other) for other in triggers)
    ]
    read = [
        _read_structure(spec, f"structures.{index}", structure, shortest)
        for index, structure in enumerate(structures)
    ]
    for trigger in shortest:
        if not any(structure.trigger == trigger for structure in read):
            refuse(spec, f"triggers: no structure begins with {trigger!r}")
    return read


def _read_structure(
    spec: GrammarSpec, place: str, structure: Json, triggers: list[str]
) -> Structure:
    if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
        refuse(spec, f'{place}: expected {{"begin": ..., "schema": ..., "end": ...}}')
    begin = structure["begin"]
    end = structure["end"]
    if not isinstance(begin, str) or not isinstance(end, str):
        refuse(spec, f"{place}: begin and end must be strings")
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        refuse(spec, f"{place}: {begin!r} doesn't begin with any of the triggers")
    return Structure(
        trigger,
        begin,
        read_schema(spec, structure["schema"]),
        end,
        f"{place}, which begins with {begin[:80]!r}: #",
    )


def check_lark(spec: GrammarSpec, lark: str) -> None:
    """Raise `RequestError` for special tokens, which aren't text, and for attributes that affect
    sampling."""
    syntax = NOT_SYNTAX.sub("", lark)
    if special := _SPECIAL_TOKEN.search(syntax):
        refuse(spec, f"{special[0]}: special tokens aren't text and can't be generated")
    if attribute := _ATTRIBUTE.search(syntax):
        refuse(spec, f"the attribute {attribute[1]} isn't supported")
