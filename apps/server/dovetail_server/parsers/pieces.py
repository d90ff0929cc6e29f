"""`OutputParser`, the base of all parsers; the events that parsers emit, which routes convert to their API's answers; the search for marks in text
that arrives in pieces. `AnswerReader` parses one sample's answer and counts its reasoning tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.request import CompletionOutput

SPACE = " \t\r\n"  # whitespace in JSON
MAX_SPACE = 64  # characters of whitespace before a mark that belong to it
_PIECE = 4_096  # characters processed at once, so that the time is linear in the length of a text
_SPACES = re.compile(f"[{SPACE}]*")


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call. Calls of an answer are numbered from 0, and one ends before the next begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of call `index`. Concatenated, the pieces are the JSON value as the model wrote it."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


class Marks:
    """Search for a few marks in pieces of text. A mark's first character must not occur again in it."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(re.escape(mark) for mark in marks))
        self._firsts = {mark[0] for mark in marks}
        self._longest = max(len(mark) for mark in marks)

    def find(self, text: str, pos: int) -> re.Match[str] | None:
        """Return the first mark in `text` at or after `pos`."""
        return self._pattern.search(text, pos)

    def certain(self, text: str, pos: int) -> int:
        """Return the position up to which `text` can't be part of a mark. There must be no whole mark after `pos`."""
        for first in self._firsts:
            begin = text.rfind(first, max(pos, len(text) - self._longest + 1))
            if begin >= 0 and any(mark.startswith(text[begin:]) for mark in self._marks):
                return begin
        return len(text)


def after_space(text: str, pos: int) -> int:
    """Return where the whitespace at `pos` ends."""
    match = _SPACES.match(text, pos)
    return match.end() if match else pos


def without_space(text: str, pos: int, end: int) -> int:
    """Return where the whitespace before `end` begins: not before `pos`, and at most MAX_SPACE characters earlier."""
    begin = max(pos, end - MAX_SPACE)
    return begin + len(text[begin:end].rstrip(SPACE))


class OutputParser:
    """Base of all parsers: a state machine over one answer's text.

    A state is a method that reads some of a text from a position on, and returns where it stopped. Where the text was cut only determines where the
    events' pieces are cut.
    """

    def __init__(self) -> None:
        self._state: Callable[[Any, str, int], int] = type(self).search  # unbound: a bound method would be a reference cycle
        self._held = ""  # text that the state wants to see again, with more after it
        self._events: list[Event] = []

    @property
    def needs_special_tokens(self) -> bool:
        """True if the format's marks are special tokens, so that the answer must be detokenized with `skip_special_tokens=False`."""
        return False

    @property
    def reasoning(self) -> bool | None:
        """True while the text so far ends within reasoning; None if the parser doesn't detect reasoning."""
        return None

    @property
    def in_call(self) -> bool:
        """True while the text so far ends within a tool call whose arguments are incomplete."""
        return False

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain after the next piece of the answer, which may be empty."""
        for begin in range(0, len(text), _PIECE):
            piece = self._held + text[begin : begin + _PIECE]
            self._held = ""
            pos = 0
            while pos < len(piece):
                pos = self._state(self, piece, pos)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the answer. The parser isn't used afterwards."""
        raise NotImplementedError

    def search(self, text: str, pos: int) -> int:
        """Initial state."""
        raise NotImplementedError

    def content(self, text: str) -> None:
        """Emit content, if not empty."""
        if text:
            self._events.append(Content(text))

    def hold(self, text: str, pos: int) -> int:
        """Hold `text` from `pos` back until more text follows. Returns the end of `text`, as a state does."""
        self._held = text[pos:]
        return len(text)


class AnswerReader:
    """Reads one sample's outputs, which are deltas."""

    __slots__ = ("_cut", "_parser", "_single", "_tokens", "reasoning_tokens")

    def __init__(self, parser: OutputParser | None, *, single: bool = False) -> None:
        """`single`: the answer ends after its first tool call; what the model writes after it is dropped."""
        self._parser = parser
        self._single, self._cut = single, False
        self._tokens = 0
        self.reasoning_tokens: int | None = None if parser is None or parser.reasoning is None else 0
        """Tokens up to the end of the reasoning, including marks; None without a reasoning parser."""

    @property
    def in_call(self) -> bool:
        """See `OutputParser.in_call`."""
        return self._parser is not None and self._parser.in_call and not self._cut

    def read(self, sample: CompletionOutput) -> Sequence[Event]:
        """Return the events that are certain after an output; all of them after the last one."""
        parser = self._parser
        if parser is None:
            return (Content(sample.text),) if sample.text else ()
        self._tokens += len(sample.token_ids)
        was_inside = parser.reasoning
        events = parser.feed(sample.text)
        if was_inside or parser.reasoning:
            self.reasoning_tokens = self._tokens
        events = events if sample.finish_reason is None else [*events, *parser.finish()]
        return list(self._until_second_call(events)) if self._single else events

    def _until_second_call(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            self._cut = self._cut or (type(event) is ToolCallStart and event.index > 0)
            if not self._cut:
                yield event


def reasoning_tokens_of(readers: Sequence[AnswerReader]) -> int | None:
    """Return the sum of all readers' reasoning tokens; None without reasoning parsers."""
    counts = [reader.reasoning_tokens for reader in readers if reader.reasoning_tokens is not None]
    return sum(counts) if counts else None
