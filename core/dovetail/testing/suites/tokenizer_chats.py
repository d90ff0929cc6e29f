"""Conversations for `TokenizerSuite`: roles and keys that formats may lack, and tools, calls and
results, with the words that must be in each unless it is rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.tokenizer import Chat

Message = Mapping[str, Any]

ODD: tuple[tuple[Mapping[str, Any], ...], ...] = (
    ({"role": "assistant", "content": "one"},),
    ({"role": "user", "content": "one"}, {"role": "user", "content": "two"}),
    ({"role": "user", "content": ""},),
    (
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        },
    ),
    ({"role": "system", "content": "one"},),
    ({"role": "user", "content": "one"}, {"role": "system", "content": "two"}),
    (
        {"role": "user", "content": "one"},
        {"role": "tool", "content": "two", "tool_call_id": "call00001"},
    ),
    ({"role": "developer", "content": "one"}, {"role": "user", "content": "two"}),
    (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "three"},
        {"role": "user", "content": "four"},
    ),
)
USER: Message = {"role": "user", "content": "question"}


def _function(name: str, key: str) -> Message:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Finds {key}",
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> Message:
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _result(number: int, name: str, content: str) -> Message:
    return {
        "role": "tool",
        "content": content,
        "tool_call_id": f"call0000{number}",
        "name": name,
    }


WEATHER = _function("find_weather", "town")
CLOCK = _function("read_clock", "zone")
FIRST = _call(1, "find_weather", {"town": "Zermatt"})
SECOND = _call(2, "read_clock", {"zone": "Urumqi"})
SUNNY = _result(1, "find_weather", "sunny skies")
NOON = _result(2, "read_clock", "past noon")
CALLS: Message = {"role": "assistant", "tool_calls": [FIRST]}
WITH_TEXT: Message = {"role": "assistant", "content": "moment please", "tool_calls": [FIRST]}
TWO: Message = {"role": "assistant", "tool_calls": [FIRST, SECOND]}
# what it is, the conversation, and words that must be in it
CARRIED: tuple[tuple[str, Chat, tuple[str, ...]], ...] = (
    ("a tool", Chat([USER], (WEATHER,)), ("question", "find_weather", "town")),
    ("a second tool", Chat([USER], (WEATHER, CLOCK)), ("find_weather", "read_clock", "zone")),
    (
        "a call",
        Chat([USER, CALLS, SUNNY], (WEATHER,)),
        ("find_weather", "Zermatt", "sunny skies"),
    ),
    (
        "a call without tools",
        Chat([USER, CALLS, SUNNY]),
        ("find_weather", "Zermatt", "sunny skies"),
    ),
    (
        "a call after a text",
        Chat([USER, WITH_TEXT, SUNNY], (WEATHER,)),
        ("moment please", "find_weather", "Zermatt", "sunny skies"),
    ),
    (
        "a second call",
        Chat([USER, TWO, SUNNY, NOON], (WEATHER, CLOCK)),
        ("Zermatt", "read_clock", "Urumqi", "sunny skies", "past noon"),
    ),
    ("a call that nothing follows", Chat([USER, CALLS]), ("find_weather", "Zermatt")),
    (
        "a last message that is continued, with tools",
        Chat(
            [USER, {"role": "assistant", "content": "begun so"}],
            (WEATHER,),
            begins_answer=False,
            continues=True,
        ),
        ("question", "find_weather", "begun so"),
    ),
    (
        "a part of a content",
        Chat(
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "p1"}, {"type": "text", "text": "p2"}],
                }
            ]
        ),
        ("p1", "p2"),
    ),
)
