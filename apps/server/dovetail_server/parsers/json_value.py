"""A scanner that finds the end of a JSON value in text that comes in pieces. The parsers of tool calls cut arguments out with it.

It tells strings, escapes and brackets apart and leaves all else to whoever reads the value: a wrong literal or a lost comma doesn't stop it.
"""

from __future__ import annotations

import re

SPACE = " \t\r\n"  # whitespace in JSON

_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[ \t\r\n,}\]]")


class JsonValue:
    """The scan of one value. Each character is looked at once, and none is kept."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")

    def __init__(self, first: str) -> None:
        """Begin before the value's first character, `first`, which is neither whitespace nor one of `,:]}`."""
        self.done = False
        self._depth = 0  # brackets that are open
        self._in_string = False
        self._escaped = False  # the last character was a backslash in a string
        self._scalar = first not in '"{['

    def feed(self, text: str, pos: int) -> int:
        """Scan on from `pos`, and return the position after the last character that belongs to the value. Sets `done` at its end; a number or
        literal ends only where another character follows."""
        if self._scalar:
            match = _AFTER_SCALAR.search(text, pos)
            self.done = match is not None
            return match.start() if match else len(text)
        while pos < len(text) and not self.done:
            pos = self._in_string_from(text, pos) if self._in_string else self._outside_string_from(text, pos)
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
