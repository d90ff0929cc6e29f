"""A tool call written as a JSON object, `{"name": …, "arguments": …}`, read while it comes. Each format that writes calls so uses it."""

from __future__ import annotations

import json
from enum import Enum, auto

from dovetail.checks import unicode_error
from dovetail_server.parsers.events import Event, ToolCallArguments, ToolCallStart
from dovetail_server.parsers.json_value import JsonValue
from dovetail_server.parsers.pieces import after_space

MAX_HELD = 65_536  # characters of a call that are kept while it isn't certain that it is one (arguments before the name, say)
MAX_NAME = 256  # characters of a key or a name, with quotes and escapes

_ARGUMENT_KEYS = ("arguments", "parameters")
_BARE_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)


class _Next(Enum):
    """The part of the object that comes next, after whitespace."""

    OBJECT = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class _Role(Enum):
    """The use of the string or value that is being read."""

    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


class JsonCall:
    """One call's object, from its brace on (whitespace may come first). It is in one of these conditions:

    - open, not `started`: it may still turn out to be no call, so all of it is held;
    - open, `started`: the name is out, and arguments go out as they come;
    - `done`: its last brace has come. Not `started`, it had no name, and it is no call;
    - `bad`: it can't go on with the next character. Not `started`, it is no call; `started`, the call ends here, and that character is no part of it.

    An object that has no mark before it (`bare`) may be an answer in JSON as well. It is a call only from the point where its arguments begin, they
    must be an object, and it is bad at the first key that no call has.
    """

    def __init__(self, index: int, call_id: str, lead: str = "", *, bare: bool = False) -> None:
        """Begin a call. `lead` is the text before it that goes with it: whitespace and a mark. It is content if this is no call."""
        self.index = index
        self.call_id = call_id
        self.started = False
        self.done = False
        self.bad = False
        self._bare = bare
        self._lead = lead
        self._held: list[str] = []  # the object so far, until the call has started
        self._held_size = 0
        self._next = _Next.OBJECT
        self._reading: JsonValue | None = None
        self._role = _Role.OTHER
        self._key = ""
        self._string: list[str] = []  # the key or name so far
        self._string_size = 0
        self._name: str | None = None
        self._arguments: list[str] | None = None  # pieces that aren't out yet; None while there are no arguments

    @property
    def open(self) -> bool:
        """True if the name is out, and the arguments aren't complete."""
        return self.started and not self.done and (self._arguments is None or (self._role is _Role.ARGUMENTS and self._reading is not None))

    def feed(self, text: str, pos: int, events: list[Event]) -> int:
        """Read on from `pos` until the object or `text` ends. Adds to `events`, and returns the position after what belongs to the object."""
        while pos < len(text) and not (self.done or self.bad):
            begin, pos = pos, self._advance(text, pos)
            if not self.started:
                pos = self._hold(text, begin, pos)
                if not self.bad and self._name is not None and not (self._bare and self._arguments is None):
                    self._start(events)
            if self.started and self._arguments:
                events.append(ToolCallArguments(self.index, "".join(self._arguments)))
                self._arguments.clear()
        if self.done and self.started and self._arguments is None:
            events.append(ToolCallArguments(self.index, "{}"))  # a call of a function that takes nothing
        return pos

    def release(self) -> str:
        """Return all text that was held: the call turned out to be none, or the answer ended before that was certain."""
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
        """Announce the call, if what was held is JSON up to here."""
        rest = "}" if self._reading is None else "null}"  # the name has just ended, or the arguments begin here
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
        """Read on by one part of the object, or by what there is of it."""
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
            self.bad = self._bare and string not in _BARE_KEYS
        else:
            self._name = string
            self.bad = not string or unicode_error(string) is not None
