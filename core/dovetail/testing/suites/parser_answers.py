"""The parser suite compares answers, to which events add up, and generates texts from examples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dovetail.api.parser import (
    Content,
    Event,
    ParserContext,
    ParserExample,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from dovetail.testing.binding import Binding
from dovetail.testing.checks import require
from dovetail.testing.suites import odd_texts

# Python's default limits are lower: of digits of an integer, and of nested calls
MANY_DIGITS = f'{{"n": {"7" * 5_000}}}'
DEEP = f'{{"a": {"[" * 30_000}{"]" * 30_000}}}'
HALF_MARKS = '{"a": "\\ud83d", "\\udc00": ["\\ude00\\ud83d"]}'
ODD_JSON = (
    '{"a": 1, "a": 2, "A": [ ], "": {"": ""}}',
    '{\r\n\t"a":\t-0.0,\n  "b":{\r}\r\n}',
    json.dumps(dict(enumerate(odd_texts.TEXTS)), ensure_ascii=False),
    json.dumps(dict(enumerate(odd_texts.TEXTS))),
    HALF_MARKS,
)


class Answer(NamedTuple):
    """A whole answer: what all events add up to."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


def added_up(events: Sequence[Event]) -> Answer:
    """Add events up. Raises `CheckFailed` for arguments before any call."""
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, []))
        elif isinstance(event, ToolCallArguments):
            require(calls, f"{event} comes before any call")
            calls[-1][1].append(event.text)
    reasoning, content = (
        "".join(event.text for event in events if isinstance(event, of))
        for of in (Reasoning, Content)
    )
    return Answer(reasoning, content, tuple((name, "".join(pieces)) for name, pieces in calls))


def in_order(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Return the kind and text of events in order, with pieces of one kind that follow each other
    put together."""
    found: list[tuple[str, str]] = []
    for event in events:
        kind = type(event).__name__
        if isinstance(event, ToolCallStart):
            found.append((kind, event.name))
        elif found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + event.text)
        else:
            found.append((kind, event.text))
    return found


def all_in_order(
    suite: Binding, tools: Sequence[Mapping[str, Any]], texts: Sequence[str]
) -> list[list[tuple[str, str]]]:
    """Return the events of each text, as an answer of its own, by a suite's parser."""
    found = []
    for text in texts:
        parser = suite.make(ParserContext(tools))
        found.append(in_order([*parser.feed(text), *parser.finish()]))
    return found


def pieces_of(event: Event) -> Sequence[str]:
    """Return the texts of an event."""
    if isinstance(event, ToolCallStart):
        return (event.id, event.name)
    return (event.text,)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_within(part: str, whole: str) -> bool:
    """Return True if the characters of `part` are in `whole`, in this order."""
    characters = iter(whole)
    return all(char in characters for char in part)


def without_space(text: str) -> str:
    return "".join(text.split())


def with_other_calls(
    example: ParserExample, name: str, arguments: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the example's text with another name and other arguments in its only call, and the
    arguments; nothing if it doesn't have them as they are."""
    if len(example.calls) != 1:
        return
    [(old_name, old)] = example.calls
    if not (is_json(old) and old.startswith('{"')):
        return
    before, verbatim, after = example.text.partition(old)
    if verbatim and before.count(old_name) == 1:
        for other in arguments:
            yield before.replace(old_name, name) + other + after, other


def renamed(example: ParserExample, names: Mapping[str, str]) -> str | None:
    """Return the example's text with other names in its calls; None if a name is also elsewhere."""
    text = example.text
    written = [name for name, _ in example.calls]
    for old, new in names.items():
        text, places = re.subn(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)
        if places != written.count(old):
            return None
    return text


def tools_with(names: Sequence[str], properties: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a tool for each name, all with the same properties."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": dict(properties)},
            },
        }
        for name in names
    ]
