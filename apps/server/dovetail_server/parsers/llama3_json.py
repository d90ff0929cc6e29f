"""Tool calls of Llama 3 models: the whole answer is `{"name": …, "parameters": {…}}`, several are separated by `;`.

`<|python_tag|>` may precede the first one.
"""

from __future__ import annotations

from dovetail_server.parsers.calls import CallParser
from dovetail_server.parsers.pieces import Marks, after_space

_TAG = "<|python_tag|>"


class Llama3JsonCalls(CallParser):
    """The mark is a special token. A call without it is recognized only at the beginning of the answer or after another call, so that
    JSON within an answer remains content."""

    marks = Marks(_TAG)

    def __init__(self) -> None:
        super().__init__()
        self._state = type(self).expect

    @property
    def needs_special_tokens(self) -> bool:
        """True: a call after text can't be distinguished without its mark."""
        return True

    def begins_call(self, char: str) -> bool:
        """Accept a brace; the object's keys decide."""
        if char == "{":
            self.begin_call(bare=True)
        return char == "{"

    def after_call(self, *, complete: bool) -> None:
        """Expect a separator and another call."""
        self._state = type(self).separator if complete else type(self).search

    def separator(self, text: str, pos: int) -> int:
        """State: after a call."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] != ";":
            self._state = type(self).search
            return pos
        self.lead = ";"
        self._state = type(self).expect
        return pos + 1
