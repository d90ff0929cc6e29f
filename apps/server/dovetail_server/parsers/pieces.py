"""The reading of text that comes in pieces, common to all parsers: states, marks that pieces may cut, and the whitespace beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dovetail_server.parsers.events import Content, Event
from dovetail_server.parsers.json_value import SPACE

MAX_SPACE = 64  # characters of whitespace before a mark that go with the mark
_PIECE = 4_096  # characters that are looked at together, so that the work for a long text grows with its length only
_SPACES = re.compile(f"[{SPACE}]*")


class Marks:
    """A few marks, each of them with a first character that comes nowhere else in it, and the search for them in pieces of text."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(re.escape(mark) for mark in marks))
        self._firsts = {mark[0] for mark in marks}
        self._longest = max(len(mark) for mark in marks)

    def find(self, text: str, pos: int) -> re.Match[str] | None:
        """Return the first mark in `text` from `pos` on."""
        return self._pattern.search(text, pos)

    def certain(self, text: str, pos: int) -> int:
        """Return the position up to which `text`, which holds no mark from `pos` on, belongs to none that begins in it either."""
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
    """Return where the whitespace before `end` begins, not before `pos`; at most MAX_SPACE characters are taken for that."""
    begin = max(pos, end - MAX_SPACE)
    return begin + len(text[begin:end].rstrip(SPACE))


class PieceReader:
    """A machine whose states are functions: each reads some of a text from a position on, and returns where it stopped."""

    def __init__(self) -> None:
        self._state: Callable[[Any, str, int], int] = type(self).search  # a method of the class: bound, it would be a reference cycle
        self._held = ""  # text that the state wants to see again, with more behind it
        self._events: list[Event] = []

    @property
    def needs_special_tokens(self) -> bool:
        """True if the format's marks are special tokens."""
        return False

    @property
    def reasoning(self) -> bool | None:
        """None: only parsers of reasoning know of it."""
        return None

    @property
    def in_call(self) -> bool:
        """False: only parsers of tool calls know of them."""
        return False

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain after `text`."""
        for begin in range(0, len(text), _PIECE):
            piece = self._held + text[begin : begin + _PIECE]
            self._held = ""
            pos = 0
            while pos < len(piece):
                pos = self._state(self, piece, pos)
        events, self._events = self._events, []
        return events

    def search(self, text: str, pos: int) -> int:
        """State: the first one."""
        raise NotImplementedError

    def content(self, text: str) -> None:
        """Add content, if it isn't empty."""
        if text:
            self._events.append(Content(text))

    def hold(self, text: str, pos: int) -> int:
        """Keep `text` from `pos` on: it comes again with what follows it. Returns the end of `text`, as a state does."""
        self._held = text[pos:]
        return len(text)
