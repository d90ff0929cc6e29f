"""Bases of all parsers of tool calls."""

from __future__ import annotations

import secrets
from typing import ClassVar

from pydantic import BaseModel

from dovetail.api.parser import Content, Event, ParserContext, ToolCallArguments, ToolCallStart
from dovetail_server.parsers.json_call import JsonCall, JsonValue
from dovetail_server.parsers.pieces import (
    MAX_SPACE,
    Marks,
    OutputParser,
    after_space,
    without_space,
)


def new_call_id() -> str:
    """Return a call id in OpenAI's format."""
    return "call_" + secrets.token_hex(12)


class CallParser(OutputParser):
    """Parser of content with tool calls. Subclasses define what follows the mark.

    Whitespace directly before a mark and after a call belongs to the markup. Text that resembles a
    call but isn't one is content, including its mark and whitespace, and the search for marks
    resumes where the resemblance ended.
    """

    marks: ClassVar[Marks]  # marks that end content

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.marks_now = self.marks
        self.index = 0  # of the next call
        self.lead = ""  # the next call's mark and whitespace; content if there is no call after all
        self._call: JsonCall | None = None

    @property
    def in_call(self) -> bool:
        return self._call is not None and self._call.open

    def feed(self, text: str) -> list[Event]:
        return super().feed(text) if self.context.tools else [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Return the remaining events. A call that is cut off before its name was emitted is
        content."""
        if self._call is not None and not self._call.started:
            self.content(self._call.release())
        self.content(self.lead + self._held)
        return self._events

    def search(self, text: str, pos: int) -> int:
        """State: content up to a mark."""
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
        """Expect a call after `mark`. `lead`: the mark with the whitespace before it."""
        self.lead = lead
        self._state = type(self).expect

    def expect(self, text: str, pos: int) -> int:
        """State: whitespace, and the character that shows whether a call begins."""
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
        """Return True and set the state if a call can begin with `char`, which the state sees
        again."""
        if char == "{":
            self.begin_call()
        return char == "{"

    def refuse(self, text: str) -> None:
        """Emit `lead` and `text` as content, since no call follows."""
        self.content(self.lead + text)
        self.lead = ""
        self._state = type(self).search

    def new_id(self) -> str:
        """Return an id for the next call."""
        return new_call_id()

    def write_arguments(self, text: str) -> None:
        """Append to the current call's arguments."""
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments):
            self._events[-1] = ToolCallArguments(self.index, last.text + text)
        elif text:
            self._events.append(ToolCallArguments(self.index, text))

    def begin_call(self, *, bare: bool = False) -> None:
        """Begin reading the object of a call."""
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
        """Continue with content, after whitespace if the call was complete."""
        self._state = type(self).skip_space if complete else type(self).search

    def skip_space(self, text: str, pos: int) -> int:
        """State: whitespace that isn't content, then `search`."""
        pos = after_space(text, pos)
        if pos < len(text):
            self._state = type(self).search
        return pos


class NamedCalls(CallParser):
    """Parser of calls that write the name before the arguments, which are a JSON object."""

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._value: JsonValue | None = None  # current arguments
        self._ids: set[str] = set()  # of calls

    @property
    def in_call(self) -> bool:
        return super().in_call or self._value is not None

    def start_call(self, name: str, written_id: str | None = None) -> None:
        """Emit a call's start, and read its arguments from here. `written_id`: the model's, which
        may repeat one."""
        call_id = self.new_id() if written_id is None or written_id in self._ids else written_id
        self._ids.add(call_id)
        self._events.append(ToolCallStart(self.index, call_id, name))
        self.lead = ""
        self._value = JsonValue("{")
        self._state = type(self).arguments

    def arguments(self, text: str, pos: int) -> int:
        """State: the arguments of a call."""
        if self._value is None:
            raise AssertionError("arguments are read that never began")
        end = self._value.feed(text, pos)
        self._events.append(ToolCallArguments(self.index, text[pos:end]))
        if self._value.done:
            self._value = None
            self.index += 1
            self.after_call(complete=True)
        return end


class ArrayCalls(CallParser):
    """Parser of calls in an array after the mark."""

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.in_array = False

    def found(self, mark: str, lead: str) -> None:
        """Expect an array after the mark."""
        self.in_array = False
        super().found(mark, lead)

    def open_array(self, text: str, pos: int) -> int:
        """State: the bracket of an array."""
        self.in_array = True
        self.lead += "["
        self._state = type(self).expect
        return pos + 1

    def after_call(self, *, complete: bool) -> None:
        """Continue the array."""
        if self.in_array and complete:
            self._state = type(self).after_element
        else:
            super().after_call(complete=complete)

    def after_element(self, text: str, pos: int) -> int:
        """State: after a call in an array."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == ",":
            self.lead = ","
            self._state = type(self).expect
            return pos + 1
        self.in_array = False
        super().after_call(complete=text[pos] == "]")
        return pos + 1 if text[pos] == "]" else pos


class ClosedCalls(CallParser):
    """Parser of calls between two marks.

    Models forget the end mark, so a call ends before it: an end mark after a call is dropped, and
    text before that mark is content.
    """

    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    marks = Marks(begin)
    _marks_after_call: ClassVar[Marks] = Marks(begin, end)

    def __init_subclass__(cls) -> None:
        cls.marks = Marks(cls.begin)
        cls._marks_after_call = Marks(cls.begin, cls.end)

    def found(self, mark: str, lead: str) -> None:
        """Begin a call, or drop the previous call's end mark."""
        self.marks_now = self.marks
        if mark == self.begin:
            super().found(mark, lead)
        else:
            self._state = type(self).skip_space

    def after_call(self, *, complete: bool) -> None:
        """Search for the end mark, too, from here on."""
        self.marks_now = self._marks_after_call
        super().after_call(complete=complete)

    def finish(self) -> list[Event]:
        """Return the remaining events. A truncated end mark is markup, too."""
        begun = self._held.strip()
        if self.marks_now is self._marks_after_call and begun and self.end.startswith(begun):
            self._held = ""
        return super().finish()
