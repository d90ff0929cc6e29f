"""Answers of gpt-oss, in the format Harmony: a sequence of messages,
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>…`.

The channel `analysis` is reasoning, `final` the answer. A message to a function is a call:
`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}`. One on `commentary` to
nobody, which announces calls, is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from dovetail.api.parser import (
    Content,
    Event,
    ParserCapabilities,
    ParserContext,
    ParserExample,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from dovetail_server.parsers.calls import new_call_id
from dovetail_server.parsers.json_call import MAX_NAME, JsonValue
from dovetail_server.parsers.pieces import Malformed, Marks, OutputParser, after_space

MAX_HEAD = 600  # characters of a message's head
_ANALYSIS = "<|channel|>analysis<|message|>"
_FINAL = "<|channel|>final<|message|>"
_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
_MESSAGE = Marks("<|message|>")
_BEGINS = Marks("<|start|>", "<|channel|>")
_ENDS = Marks("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class _Part(NamedTuple):
    """Part of a message's head. Patterns are possessive, so that a long head of spaces isn't tried
    in all ways."""

    whole: str
    cut: str = ""  # all its beginnings but the whole and nothing


def _cut(text: str) -> str:
    """Return a pattern of the beginnings of a text."""
    return "|".join(re.escape(text[:end]) for end in range(1, len(text)))


def _mark(text: str) -> _Part:
    return _Part(re.escape(text), _cut(text))


def _recipient(group: str) -> _Part:
    name = r"[^\s<>{}\"]"
    return _Part(
        rf"(?:\s*+to=(?P<{group}>{name}{{1,{MAX_NAME}}}+))?",
        rf"\s*+(?:{_cut('to=')}|to={name}{{0,{MAX_NAME}}}+)",
    )


_SPACE = _Part(r"\s*+")
_AUTHOR = (
    _mark("<|start|>"),
    _SPACE,
    _Part("(?:assistant)?", _cut("assistant")),
    _recipient("to_first"),
    _SPACE,
)
_CHANNEL = (
    _mark("<|channel|>"),
    _SPACE,
    _Part(
        "(?P<channel>analysis|commentary|final)",
        "|".join(map(_cut, ("analysis", "commentary", "final"))),
    ),
    _recipient("to"),
    _SPACE,
    _Part(r"(?P<type>(?:<\|constrain\|>)?\s*+\w{0,32}+\s*+)", _cut("<|constrain|>")),
    _mark("<|message|>"),
)


def _whole(parts: Sequence[_Part]) -> str:
    return "".join(part.whole for part in parts)


def _beginnings(parts: Sequence[_Part]) -> str:
    """Return a pattern of texts that more text may complete."""
    pattern = r"\Z"
    for part in reversed(parts):
        unnamed = re.sub(r"\(\?P<\w+>", "(?:", part.whole)
        pattern = rf"(?:(?:{part.cut})?\Z|{unnamed}{pattern})"
    return pattern


_HEAD = re.compile(f"(?:{_whole(_AUTHOR)})?{_whole(_CHANNEL)}")
_BEGINS_HEAD = re.compile(f"{_beginnings((*_AUTHOR, *_CHANNEL))}|{_beginnings(_CHANNEL)}")


class HarmonyAnswer(OutputParser):
    """All marks are special tokens. Text outside messages is content: that of a model which is
    constrained to a format has no marks. A message ends where the next begins if its end mark is
    missing."""

    capabilities = ParserCapabilities(
        calls=True,
        reasoning=(_ANALYSIS, _FINAL),
        special_tokens=True,
        templates=(("<|start|>assistant", "<|channel|>analysis"),),
    )
    examples = (
        ParserExample("Hi <|channel.", "Hi <|channel."),
        ParserExample(f"{_FINAL}Hi.<|return|>", "Hi."),
        ParserExample(f"{_ANALYSIS}a <|en<|end|><|start|>assistant{_FINAL}b", "b", "a <|en"),
        ParserExample(
            f"{_ANALYSIS}a<|end|><|start|>assistant{_CALL}{{}}<|call|>",
            reasoning="a",
            calls=(("f", "{}"),),
        ),
        ParserExample(
            f'{_ANALYSIS}a<|end|><|start|>assistant{_CALL}{{"a": "}}<"}}<|call|>'
            f'<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{{"b": '
            f"[1]}}<|call|>",
            reasoning="a",
            calls=(("f", '{"a": "}<"}'), ("g", '{"b": [1]}')),
        ),
        ParserExample("<|channel|>oops<|message|>x", "<|channel|>oops<|message|>x"),
    )
    malformed = (
        Malformed(
            "no `<|call|>`",
            "the call ends with its last brace",
            ParserExample(f"{_CALL}{{}} B", " B", calls=(("f", "{}"),)),
        ),
        Malformed(
            "no `<|end|>`",
            "the next message's first mark ends the message",
            ParserExample(f"{_CALL}{{}}{_FINAL}B", "B", calls=(("f", "{}"),)),
        ),
        Malformed(
            "a call without arguments",
            "they are empty",
            ParserExample(f"{_CALL}<|call|>", calls=(("f", "{}"),)),
        ),
        Malformed(
            "arguments that aren't a JSON object",
            "they are what the model wrote",
            ParserExample(f"{_CALL}oops<|call|>B", "B", calls=(("f", "oops"),)),
        ),
        Malformed(
            "an unknown channel",
            "all of it is content",
            ParserExample(
                "<|channel|>oops<|message|>x<|end|>", "<|channel|>oops<|message|>x<|end|>"
            ),
        ),
    )

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._event: Callable[[str], Event] = Content  # what the text of the present message is
        self._index = -1  # of the last call
        self._in_call = False
        self._value: JsonValue | None = None  # the call's arguments, if they are an object
        if context.starts_in_reasoning:
            self._event = Reasoning
            self._state = type(self).text

    @property
    def in_reasoning(self) -> bool:
        return self._event is Reasoning

    @property
    def in_call(self) -> bool:
        return self._in_call

    def finish(self) -> list[Event]:
        """Return the remaining events. A truncated head is content."""
        if not self._in_call:
            self._put(self._event, self._held)
        self._held = ""
        return self._events

    def search(self, text: str, pos: int) -> int:
        """State: outside messages."""
        match = _BEGINS.find(text, pos)
        end = match.start() if match else _BEGINS.certain(text, pos)
        self.content(text[pos:end])
        if match is None:
            return self.hold(text, end)
        self._state = type(self).head
        return end

    def head(self, text: str, pos: int) -> int:
        """State: from a message's first mark to `<|message|>`."""
        stop = min(len(text), pos + MAX_HEAD)
        match = _MESSAGE.find(text[:stop], pos)
        if match is None and stop < pos + MAX_HEAD and _BEGINS_HEAD.fullmatch(text, pos):
            return self.hold(text, pos)
        head = _HEAD.fullmatch(text, pos, match.end()) if match is not None else None
        recipient = None if head is None else head["to"] or head["to_first"]
        if head is None or (
            recipient is None and head["type"]
        ):  # only calls have a type of content
            self.content(text[pos])
            self._state = type(self).search
            return pos + 1
        self._begin(head["channel"], recipient)
        return head.end()

    def text(self, text: str, pos: int) -> int:
        """State: a message's text, up to a mark."""
        match = _ENDS.find(text, pos)
        end = match.start() if match else _ENDS.certain(text, pos)
        self._put(self._event, text[pos:end])
        return self.hold(text, end) if match is None else self._end(match)

    def first_argument(self, text: str, pos: int) -> int:
        """State: before a call's arguments."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == "{":
            self._value = JsonValue("{")
            self._state = type(self).arguments
            return pos
        match = _ENDS.find(text, pos)
        if match is not None and match.start() == pos:
            self._put(self._argument, "{}")
            return self._end(match)
        if match is None and _ENDS.certain(text, pos) == pos:
            return self.hold(text, pos)
        self._event = self._argument
        self._state = type(self).text
        return pos

    def arguments(self, text: str, pos: int) -> int:
        """State: a call's object."""
        if self._value is None:
            raise AssertionError("arguments are read that never began")
        end = self._value.feed(text, pos)
        self._put(self._argument, text[pos:end])
        if self._value.done:
            self._in_call = False
            self._event = Content
            self._state = type(self).after_arguments
        return end

    def after_arguments(self, text: str, pos: int) -> int:
        """State: after a call's object. Whitespace before the end mark belongs to the markup."""
        begin = after_space(text, pos)
        match = _ENDS.find(text, begin)
        if match is not None and match.start() == begin:
            return self._end(match)
        if match is None and _ENDS.certain(text, begin) == begin and begin - pos < MAX_HEAD:
            return self.hold(text, pos)
        self._state = type(self).search
        return pos

    def _begin(self, channel: str, recipient: str | None) -> None:
        """Begin a message."""
        self._state = type(self).text
        self._event = Reasoning if channel == "analysis" else Content
        if recipient is None or not self.context.tools:
            return
        self._index += 1
        self._in_call = True
        self._event = self._argument
        self._events.append(
            ToolCallStart(
                self._index, new_call_id(), recipient.removeprefix("functions.") or recipient
            )
        )
        self._state = type(self).first_argument

    def _end(self, mark: re.Match[str]) -> int:
        """End a message before a mark that begins another, or after its own."""
        self._in_call = False
        self._event = Content
        self._state = type(self).search
        return mark.start() if mark[0] in ("<|start|>", "<|channel|>") else mark.end()

    def _argument(self, text: str) -> Event:
        return ToolCallArguments(self._index, text)

    def _put(self, event: Callable[[str], Any], text: str) -> None:
        if text:
            self._events.append(event(text))
