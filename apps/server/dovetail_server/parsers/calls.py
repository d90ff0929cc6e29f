"""The base of all parsers of tool calls: content up to the mark that begins calls, and what is held back on the way to it."""

from __future__ import annotations

import secrets
from typing import ClassVar

from dovetail_server.parsers.events import Event
from dovetail_server.parsers.json_call import JsonCall
from dovetail_server.parsers.pieces import MAX_SPACE, Marks, PieceReader, after_space, without_space


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
        self.index = 0  # of the next call
        self.lead = ""  # the mark, with whitespace and what else goes with the next call; content if that is none
        self._call: JsonCall | None = None

    @property
    def in_call(self) -> bool:
        """True between a call's name and the end of its arguments."""
        return self._call is not None and self._call.open

    def finish(self) -> list[Event]:
        """Return what was held. A call that was cut off keeps what is out of it; one whose name isn't out yet is content."""
        if self._call is not None and not self._call.started:
            self.content(self._call.release())
        self.content(self.lead + self._held)
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
        """Expect a call after `mark`. `lead` is the mark with the whitespace before it."""
        self.lead = lead
        self._state = type(self).expect

    def expect(self, text: str, pos: int) -> int:
        """State: whitespace, and the character that tells if a call begins."""
        begin = after_space(text, pos)
        if begin - pos <= MAX_SPACE:
            if begin == len(text):
                return self.hold(text, pos)
            space = text[pos:begin]
            self.lead += space
            if self.begins_call(text[begin]):
                return begin
            self.lead = self.lead[: len(self.lead) - len(space)]
        self.refuse("")
        return pos

    def begins_call(self, char: str) -> bool:
        """Return True, with the state set, if a call can begin with `char`, which comes again."""
        if char == "{":
            self.begin_call()
        return char == "{"

    def refuse(self, text: str) -> None:
        """Give `lead` and `text` out as content: no call follows them."""
        self.content(self.lead + text)
        self.lead = ""
        self._state = type(self).search

    def new_id(self) -> str:
        """Return an id for a call, as OpenAI's look."""
        return "call_" + secrets.token_hex(12)

    def begin_call(self, *, bare: bool = False) -> None:
        """Go on with the object of a call."""
        self._call = JsonCall(self.index, self.new_id(), self.lead, bare=bare)
        self.lead = ""
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
                self.index += 1
                self.after_call(complete=call.done)
            else:
                self.refuse(call.release())
        return pos

    def after_call(self, *, complete: bool) -> None:
        """Go on after a call: with content, but for whitespace if the call was complete."""
        self._state = type(self).skip_space if complete else type(self).search

    def skip_space(self, text: str, pos: int) -> int:
        """State: whitespace that isn't content, then `search`."""
        pos = after_space(text, pos)
        if pos < len(text):
            self._state = type(self).search
        return pos


_CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"


class ClosedCalls(CallParser):
    """A parser of calls between `<tool_call>` and `</tool_call>`. Models forget the end mark, so it ends nothing: after a call it is dropped where it
    comes, and what is between is content."""

    marks = Marks(_CALL_BEGIN)
    _marks_after_call = Marks(_CALL_BEGIN, CALL_END)

    def found(self, mark: str, lead: str) -> None:
        """Begin a call, or drop the end mark of the last one."""
        self.marks_now = self.marks
        if mark == _CALL_BEGIN:
            super().found(mark, lead)
        else:
            self._state = type(self).skip_space

    def after_call(self, *, complete: bool) -> None:
        """Look for the end mark from here on."""
        self.marks_now = self._marks_after_call
        super().after_call(complete=complete)

    def finish(self) -> list[Event]:
        """Return what was held. The beginning of an end mark that was cut off is markup too."""
        begun = self._held.strip()
        if self.marks_now is self._marks_after_call and begun and CALL_END.startswith(begun):
            self._held = ""
        return super().finish()
