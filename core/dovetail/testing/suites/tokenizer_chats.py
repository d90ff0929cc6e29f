"""Conversations for `TokenizerSuite`: roles and keys that formats may lack, and tools, calls and
results, with the words that must be in each unless it is rejected; and conversations with a text in
any place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    ({"role": "user"},),
    ({"role": "user", "content": []},),
    ({"role": "assistant", "content": ""}, {"role": "user", "content": "one"}),
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


TURNS = 200  # of a long conversation


def _part(text: str) -> Message:
    return {"type": "text", "text": text}


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


def _result(number: int, name: str, content: str | Sequence[Message]) -> Message:
    return {
        "role": "tool",
        "content": content,
        "tool_call_id": f"call0000{number}",
        "name": name,
    }


def _answer(content: str | Sequence[Message]) -> Message:
    return {"role": "assistant", "content": content}


def _continued(content: str | Sequence[Message]) -> Chat:
    return Chat([USER, _answer(content)], begins_answer=False, continues=True)


def _called(arguments: Mapping[str, Any]) -> Chat:
    call = _call(1, "find_weather", arguments)
    return Chat([USER, {"role": "assistant", "tool_calls": [call]}, SUNNY], (WEATHER,))


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
    ("a tool", Chat([USER], (WEATHER,)), ("question", "find_weather", "town", "Finds town")),
    (
        "a second tool",
        Chat([USER], (WEATHER, CLOCK)),
        ("find_weather", "read_clock", "zone", "Finds zone"),
    ),
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
    (
        "a third part",
        Chat([{"role": "user", "content": [_part("p1"), _part(""), _part("p3")]}]),
        ("p1", "p3"),
    ),
    (
        "a part of an answer",
        Chat([USER, {"role": "assistant", "content": [_part("a1"), _part("a2")]}, USER]),
        ("question", "a1", "a2", "question"),
    ),
    (
        "a part of a result",
        Chat([USER, CALLS, _result(1, "find_weather", [_part("r1"), _part("r2")])], (WEATHER,)),
        ("r1", "r2"),
    ),
    (
        "a last message that is continued, of parts",
        _continued([_part("begun"), _part("so")]),  # formats may join parts by line breaks
        ("question", "begun", "so"),
    ),
    (
        "a last message that is continued, of one part",
        _continued([_part("begun so")]),
        ("question", "begun so"),
    ),
    (
        "a last message that is continued, after equal ones",
        Chat([USER, _answer("same"), USER, _answer("same")], begins_answer=False, continues=True),
        ("question", "same", "question", "same"),
    ),
    (
        "a question that is continued",
        Chat(
            [USER, _answer("one"), {"role": "user", "content": "and then"}],
            begins_answer=False,
            continues=True,
        ),
        ("question", "one", "and then"),
    ),
    (
        "an argument without a value",
        _called({"town": "Zermatt", "none": "", "days": 0, "sure": False, "list": []}),
        ("Zermatt", "none", "days", "sure", "list"),
    ),
    (
        "an argument within another",
        _called({"town": {"name": ["Zermatt", {"deep": 417}]}, "days": 12.5}),
        ("Zermatt", "deep", "417", "12.5"),
    ),
    ("a call without arguments", _called({}), ("find_weather", "sunny skies")),
    (
        "a third call",
        Chat(
            [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [FIRST, SECOND, _call(3, "find_weather", {"town": "Lhasa"})],
                },
                SUNNY,
                NOON,
                _result(3, "find_weather", "snow there"),
            ],
            (WEATHER, CLOCK),
        ),
        ("Zermatt", "Urumqi", "Lhasa", "sunny skies", "past noon", "snow there"),
    ),
    (
        "the third of three tools",
        Chat([USER], (WEATHER, CLOCK, _function("third_one", "measure"))),
        ("find_weather", "read_clock", "third_one", "measure"),
    ),
    (
        "equal messages",
        Chat([USER, _answer("same"), USER, _answer("same"), USER]),
        ("question", "same", "question", "same", "question"),
    ),
    (
        "a long conversation",
        Chat(
            [
                {"role": "assistant" if turn % 2 else "user", "content": f"turn {turn:04}."}
                for turn in range(TURNS + 1)
            ]
        ),
        tuple(f"turn {turn:04}." for turn in range(TURNS + 1)),
    ),
)


def with_text(text: str) -> Iterator[tuple[str, bool, Chat]]:
    """Yield conversations with a text in one place each: what has it, True if it stands there as it
    is, and the conversation."""
    said = {"role": "user", "content": text}
    first: Message = {"role": "user", "content": [_part(text), _part("b")]}
    second: Message = {"role": "user", "content": [_part("a"), _part(text)]}
    called = _function("find_weather", "town")
    described = {**called, "function": {**called["function"], "description": text}}
    named = {**called, "function": {**called["function"], "name": text}}
    asked = _call(1, "find_weather", {"town": text})
    keyed = _call(1, "find_weather", {text: "Zermatt"})
    yield "a question", True, Chat([said])
    yield "a second question", True, Chat([USER, _answer("b"), said])
    yield "an answer", True, Chat([USER, _answer(text), USER])
    yield "an instruction", True, Chat([{"role": "system", "content": text}, USER])
    yield "the first part", True, Chat([first])
    yield "the second part", True, Chat([second])
    yield "a part of an answer", True, Chat([USER, _answer([_part(text)]), USER])
    yield "what is continued", True, _continued(text)
    yield "a part of what is continued", True, _continued([_part("a"), _part(text)])
    yield "a tool's description", False, Chat([USER], (described,))
    yield "a tool's name", False, Chat([USER], (named,))
    yield (
        "a call's argument",
        False,
        Chat([USER, {"role": "assistant", "tool_calls": [asked]}, SUNNY], (WEATHER,)),
    )
    yield (
        "the name of an argument",
        False,
        Chat([USER, {"role": "assistant", "tool_calls": [keyed]}, SUNNY], (WEATHER,)),
    )
    yield "a result", False, Chat([USER, CALLS, _result(1, "find_weather", text)], (WEATHER,))
    reasoned = {"role": "assistant", "content": "b", "reasoning_content": text}
    yield "reasoning", False, Chat([USER, reasoned, USER])
