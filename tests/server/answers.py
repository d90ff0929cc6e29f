"""Answers as parsers might find them, for tests of the APIs that give them in parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from dovetail.api.parser import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dovetail.registry.registry import Registry
from dovetail.registry.selection import PluginSelection
from dovetail_server.parsers.reader import AnswerParser
from dovetail_server.parsers.registry import ChosenParsers, KnownParsers, parser_for

KNOWN = KnownParsers(Registry.discover(PluginSelection(allow=()), environ={}))  # built in
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
JSON_OBJECTS = st.dictionaries(
    TEXTS, st.none() | st.booleans() | st.integers(-9, 9) | TEXTS, max_size=3
).map(json.dumps)


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Thoughts, texts and calls in any order, each in pieces of any size."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=5)):
        if kind == "call":
            events.append(ToolCallStart(calls, f"call_{calls}", draw(TEXTS)))
            events += [
                ToolCallArguments(calls, piece) for piece in pieces(draw, draw(JSON_OBJECTS))
            ]
            calls += 1
        else:
            events += [
                Content(text) if kind == "text" else Reasoning(text)
                for text in pieces(draw, draw(TEXTS))
            ]
    return events


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """The text, cut at up to three places."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read_events(stream: bytes) -> list[dict[str, object]]:
    """The events of a stream, each with its type said twice alike."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def parser_named(
    tool_parser: str | None,
    reasoning_parser: str | None = None,
    *,
    tools: Sequence[Mapping[str, Any]],
    inside: bool = False,
) -> AnswerParser:
    """Return a parser of one answer. `inside`: the prompt ends with <think>."""
    calls = None if tool_parser is None else KNOWN.named("calls", tool_parser)
    reasoning = None if reasoning_parser is None else KNOWN.named("reasoning", reasoning_parser)
    parser = parser_for(ChosenParsers(calls, reasoning), "<think>" if inside else "", tools)
    assert parser is not None
    return parser
