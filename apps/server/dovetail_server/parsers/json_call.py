"""`JsonCall`: incremental parser of a tool call as a JSON object, `{"name": …, "arguments": …}`,
for all formats that use one. `JsonValue`: scanner for the end of a JSON value in text that arrives
in pieces, with which parsers extract arguments."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from dovetail.api.parser import MAX_HELD, Event, ToolCallArguments, ToolCallStart
from dovetail.serving import unicode_error
from dovetail_server.parsers.pieces import after_space

MAX_NAME = 256  # characters of a key or a name, including quotes and escapes

_ARGUMENT_KEYS = ("arguments", "parameters")
_BARE_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[ \t\r\n,}\]]")


class JsonValue:
    """Scan of one value. Each character is scanned once, and none is stored. It only tracks
    strings, escapes and brackets: invalid literals or missing commas don't stop it."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")

    def __init__(self, first: str) -> None:
        """`first`: the value's first character, neither whitespace nor one of `,:]}`, which `feed`
        sees again."""
        self.done = False
        self._depth = 0  # open brackets
        self._in_string = False
        self._escaped = False  # the last character was a backslash in a string
        self._scalar = first not in '"{['

    def feed(self, text: str, pos: int) -> int:
        """Scan from `pos`, and return the position after the value's last character. Sets `done` at
        its end; numbers and literals end only where another character follows."""
        if self._scalar:
            match = _AFTER_SCALAR.search(text, pos)
            self.done = match is not None
            return match.start() if match else len(text)
        while pos < len(text) and not self.done:
            pos = (
                self._in_string_from(text, pos)
                if self._in_string
                else self._outside_string_from(text, pos)
            )
        return pos

    def _in_string_from(self, text: str, pos: int) -> int:
        if self._escaped:
            self._escaped = False
            return pos + 1
        match = _QUOTE_OR_ESCAPE.search(text, pos)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return match.end()

    def _outside_string_from(self, text: str, pos: int) -> int:
        match = _BRACKET_OR_QUOTE.search(text, pos)
        if match is None:
            return len(text)
        if match[0] == '"':
            self._in_string = True
        elif match[0] in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth == 0
        return match.end()


class _Next(Enum):
    """The expected next part of the object, after whitespace."""

    OBJECT = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class _Role(Enum):
    """Role of the current string or value."""

    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


class JsonCall:
    """One call's object, after optional whitespace. It is in one of these states:

    - open, not `started`: it may not be a call, so all of it is held;
    - open, `started`: the name has been emitted, and arguments are emitted as they arrive;
    - `done`: the object is complete. If it isn't `started`, it had no name and isn't a call;
    - `bad`: the next character can't continue it. If it isn't `started`, it isn't a call; otherwise
      the call ends before that character.

    An object without a mark before it (`bare`) may also be an answer in JSON. It counts as a call
    once its arguments begin, which must be an object, and it is bad at a key before them that calls
    don't have.
    """

    def __init__(self, index: int, call_id: str, lead: str = "", *, bare: bool = False) -> None:
        """`lead`: whitespace and mark before the call, which are content if it isn't one."""
        self.index = index
        self.call_id = call_id
        self.started = False
        self.done = False
        self.bad = False
        self._bare = bare
        self._lead = lead
        self._held: list[str] = []  # the object so far, until the call starts
        self._held_size = 0
        self._next = _Next.OBJECT
        self._reading: JsonValue | None = None
        self._role = _Role.OTHER
        self._key = ""
        self._string: list[str] = []  # the key or name so far
        self._string_size = 0
        self._name: str | None = None
        # pieces not emitted yet; None before the arguments
        self._arguments: list[str] | None = None

    @property
    def open(self) -> bool:
        """True if the name has been emitted, and the arguments are incomplete."""
        return (
            self.started
            and not self.done
            and (
                self._arguments is None
                or (self._role is _Role.ARGUMENTS and self._reading is not None)
            )
        )

    def feed(self, text: str, pos: int, events: list[Event]) -> int:
        """Parse from `pos` until the object or `text` ends. Appends to `events`; returns the
        position after the object's text."""
        while pos < len(text) and not (self.done or self.bad):
            begin = pos
            pos = self._advance(text, pos)
            if not self.started:
                pos = self._hold(text, begin, pos)
                waits = self._bare and self._arguments is None
                if self._name is not None and not (self.bad or waits):
                    self._start(events)
            if self.started and self._arguments:
                events.append(ToolCallArguments(self.index, "".join(self._arguments)))
                self._arguments.clear()
        if self.done and self.started and self._arguments is None:
            events.append(ToolCallArguments(self.index, "{}"))  # a call without arguments
        return pos

    def release(self) -> str:
        """Return all held text, because it isn't a call, or the answer ended before that was
        certain."""
        return self._lead + "".join(self._held)

    def _hold(self, text: str, begin: int, end: int) -> int:
        room = MAX_HELD - self._held_size
        if end - begin > room:
            self.bad = True
            end = begin + room
        self._held.append(text[begin:end])
        self._held_size += end - begin
        return end

    def _start(self, events: list[Event]) -> None:
        """Emit the call's start if the held text is valid JSON so far."""
        # after the name, or at the beginning of the arguments
        rest = "}" if self._reading is None else "null}"
        try:
            json.loads("".join(self._held) + rest)
        except (ValueError, RecursionError):
            self.bad = True
            return
        self.started = True
        self._held.clear()
        self._lead = ""
        events.append(ToolCallStart(self.index, self.call_id, self._name or ""))

    def _advance(self, text: str, pos: int) -> int:
        """Parse one part of the object, or as much of it as there is."""
        if self._reading is not None:
            return self._read(self._reading, text, pos)
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        char = text[pos]
        if self._next is _Next.VALUE:
            self._begin_value(char)
            return pos
        if char == '"' and self._next in (_Next.KEY, _Next.KEY_OR_END):
            self._begin(char, _Role.KEY)
            return pos
        if char == "{" and self._next is _Next.OBJECT:
            self._next = _Next.KEY_OR_END
        elif char == ":" and self._next is _Next.COLON:
            self._next = _Next.VALUE
        elif char == "," and self._next is _Next.COMMA_OR_END:
            self._next = _Next.KEY
        elif char == "}" and self._next in (_Next.KEY_OR_END, _Next.COMMA_OR_END):
            self.done = True
        else:
            self.bad = True
            return pos
        return pos + 1

    def _begin(self, char: str, role: _Role) -> None:
        self._reading = JsonValue(char)
        self._role = role
        self._string.clear()
        self._string_size = 0

    def _begin_value(self, char: str) -> None:
        if char in ",:]}":
            self.bad = True
        elif self._key == "name" and self._name is None:
            self.bad = char != '"'
            self._begin(char, _Role.NAME)
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self.bad = self._bare and char != "{"
            self._arguments = []
            self._begin(char, _Role.ARGUMENTS)
        else:
            self._begin(char, _Role.OTHER)

    def _read(self, value: JsonValue, text: str, pos: int) -> int:
        end = value.feed(text, pos)
        if self._role is _Role.ARGUMENTS and self._arguments is not None:
            if end > pos:
                self._arguments.append(text[pos:end])
        elif self._role in (_Role.KEY, _Role.NAME):
            room = MAX_NAME - self._string_size
            if end - pos > room:
                self.bad = True
                return pos + room
            self._string.append(text[pos:end])
            self._string_size += end - pos
        if value.done:
            self._reading = None
            self._end_value()
        return end

    def _end_value(self) -> None:
        self._next = _Next.COLON if self._role is _Role.KEY else _Next.COMMA_OR_END
        if self._role not in (_Role.KEY, _Role.NAME):
            return
        try:
            string = str(json.loads("".join(self._string)))
        except ValueError:
            self.bad = True
            return
        if self._role is _Role.KEY:
            self._key = string
            self.bad = self._bare and not self.started and string not in _BARE_KEYS
        else:
            self._name = string
            self.bad = not string or unicode_error(string) is not None
