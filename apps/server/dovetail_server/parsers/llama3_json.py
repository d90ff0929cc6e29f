"""Tool calls as Llama 3 models write them: the whole answer is `{"name": …, "parameters": {…}}`, several are separated by `;`.

`<|python_tag|>` may stand before the first one.
"""

from __future__ import annotations

from dovetail_server.parsers.calls import CallParser
from dovetail_server.parsers.pieces import Marks, after_space

_TAG = "<|python_tag|>"


class Llama3JsonCalls(CallParser):
    """The mark is a special token. A call without it counts only at the beginning of the answer or behind another call, so that JSON within an
    answer stays content."""

    marks = Marks(_TAG)

    def __init__(self) -> None:
        super().__init__()
        self._state = type(self).expect

    @property
    def needs_special_tokens(self) -> bool:
        """True: else a call that follows text could not be told from the text."""
        return True

    def begins_call(self, char: str) -> bool:
        """Take a brace for the beginning of a call, until its keys say otherwise."""
        if char == "{":
            self.begin_call(bare=True)
        return char == "{"

    def after_call(self, *, complete: bool) -> None:
        """Look for a separator and another call."""
        self._state = type(self).separator if complete else type(self).search

    def separator(self, text: str, pos: int) -> int:
        """State: what follows a call."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] != ";":
            self._state = type(self).search
            return pos
        self.lead = ";"
        self._state = type(self).expect
        return pos + 1
