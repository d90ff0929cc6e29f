"""`JsonValue`: scanner for the end of a JSON value in text that arrives in pieces, with which parsers extract arguments.

It only tracks strings, escapes and brackets: invalid literals or missing commas don't stop it.
"""

from __future__ import annotations

import re

SPACE = " \t\r\n"  # whitespace in JSON

_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[ \t\r\n,}\]]")


class JsonValue:
    """Scan of one value. Each character is scanned once, and none is stored."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")

    def __init__(self, first: str) -> None:
        """`first`: the value's first character, neither whitespace nor one of `,:]}`, which `feed` sees again."""
        self.done = False
        self._depth = 0  # open brackets
        self._in_string = False
        self._escaped = False  # the last character was a backslash in a string
        self._scalar = first not in '"{['

    def feed(self, text: str, pos: int) -> int:
        """Scan from `pos`, and return the position after the value's last character. Sets `done` at its end; numbers and literals end only where
        another character follows."""
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
