"""`OutputParser`, the base of the built-in parsers, and the search for marks in text that arrives
in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel

from dovetail.api.parser import Content, Event, Parser, ParserContext, ParserExample

SPACE = " \t\r\n"  # whitespace in JSON
MAX_SPACE = 64  # characters of whitespace before a mark that belong to it
_PIECE = 4_096  # characters processed at once, so that the time is linear in the length of a text
_SPACES = re.compile(f"[{SPACE}]*")


class Marks:
    """Search for a few marks in pieces of text. A mark's first character must not occur again in
    it."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(re.escape(mark) for mark in marks))
        self._firsts = {mark[0] for mark in marks}
        self._longest = max(len(mark) for mark in marks)

    def find(self, text: str, pos: int) -> re.Match[str] | None:
        """Return the first mark in `text` at or after `pos`."""
        return self._pattern.search(text, pos)

    def certain(self, text: str, pos: int) -> int:
        """Return the position up to which `text` can't be part of a mark. There must be no whole
        mark after `pos`."""
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
    """Return where the whitespace before `end` begins: not before `pos`, and at most MAX_SPACE
    characters earlier."""
    begin = max(pos, end - MAX_SPACE)
    return begin + len(text[begin:end].rstrip(SPACE))


class Malformed(NamedTuple):
    """A mistake that models make in calls, and how the parser recovers. The documentation and tests
    are made from these."""

    mistake: str
    recovery: str
    example: ParserExample


class OutputParser(Parser):
    """A parser as a state machine.

    A state is a method that reads some of a text from a position on, and returns where it stopped.
    Where the text was cut only determines where the events' pieces are cut.
    """

    malformed: ClassVar[tuple[Malformed, ...]] = ()

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        # unbound: a bound method would be a reference cycle
        self._state: Callable[[Any, str, int], int] = type(self).search
        self._held = ""  # text that the state wants to see again, with more after it
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        for begin in range(0, len(text), _PIECE):
            piece = self._held + text[begin : begin + _PIECE]
            self._held = ""
            pos = 0
            while pos < len(piece):
                pos = self._state(self, piece, pos)
        events = self._events
        self._events = []
        return events

    def search(self, text: str, pos: int) -> int:
        """Initial state."""
        raise NotImplementedError

    def content(self, text: str) -> None:
        """Emit content, if not empty."""
        if text:
            self._events.append(Content(text))

    def hold(self, text: str, pos: int) -> int:
        """Hold `text` from `pos` back until more text follows. Returns the end of `text`, as a
        state does."""
        self._held = text[pos:]
        return len(text)
