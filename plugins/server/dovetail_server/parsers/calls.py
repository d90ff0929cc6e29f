"""The base of all parsers of tool calls: content up to the mark that begins calls, and what is held back on the way to it."""

from __future__ import annotations

import secrets
from typing import ClassVar

from dovetail_server.parsers.events import Event
from dovetail_server.parsers.json_call import JsonCall
from dovetail_server.parsers.pieces import Marks, PieceReader, after_space, without_space


class CallParser(PieceReader):
    """A parser of content with tool calls in it. A subclass says what follows the mark.

    Whitespace directly before a mark and directly after a call goes with the markup and isn't content. Text that looks like a call and is none is
    content, with its mark and whitespace, and the search for marks goes on where it stopped to look like a call.

    At most MAX_HELD characters and a few are held back.
    """

    marks: ClassVar[Marks]  # marks to which content may lead

    def __init__(self) -> None:
        super().__init__()
        self.marks_now = self.marks
        self._index = 0  # of the next call
        self._call: JsonCall | None = None

    def finish(self) -> list[Event]:
        """Return what was held. A call that was cut off keeps what is out of it; one whose name isn't out yet is content."""
        if self._call is not None and not self._call.started:
            self.content(self._call.release())
        self.content(self._held)
        return self._events

    def search(self, text: str, pos: int) -> int:
        """State: content, up to a mark."""
        match = self.marks_now.find(text, pos)
        if match is None:
            end = without_space(text, pos, self.marks_now.certain(text, pos))
            self.content(text[pos:end])
            return self.hold(text, end)
        end = without_space(text, pos, match.start())
        self.content(text[pos:end])
        self.found(match[0], text[end : match.end()])
        return match.end()

    def found(self, mark: str, lead: str) -> None:
        """Go on after `mark`. `lead` is the mark with the whitespace before it."""
        raise NotImplementedError

    def new_id(self) -> str:
        """Return an id for a call, as OpenAI's look."""
        return "call_" + secrets.token_hex(12)

    def begin_call(self, lead: str, *, bare: bool = False) -> None:
        """Go on with the object of a call, `lead` being content if it is none."""
        self._call = JsonCall(self._index, self.new_id(), lead, bare=bare)
        self._state = type(self).read_call

    def read_call(self, text: str, pos: int) -> int:
        """State: the object of a call."""
        call = self._call
        if call is None:
            raise AssertionError("a call is read that was never begun")
        pos = call.feed(text, pos, self._events)
        if call.done or call.bad:
            self._call = None
            if call.started:
                self._index += 1
                self.after_call(complete=call.done)
            else:
                self.content(call.release())
                self.no_call()
        return pos

    def after_call(self, *, complete: bool) -> None:
        """Go on after a call: with content, but for whitespace if the call was complete."""
        self._state = type(self).skip_space if complete else type(self).search

    def no_call(self) -> None:
        """Go on after text that was no call."""
        self._state = type(self).search

    def skip_space(self, text: str, pos: int) -> int:
        """State: whitespace that isn't content, then `search`."""
        pos = after_space(text, pos)
        if pos < len(text):
            self._state = type(self).search
        return pos
