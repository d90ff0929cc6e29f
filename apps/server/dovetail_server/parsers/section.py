"""`SectionCalls`: base of formats that write a section of calls, each with a name, a separator
and arguments in JSON, between special tokens."""

from __future__ import annotations

import re
from typing import ClassVar

from dovetail.api.parser import Event
from dovetail_server.parsers.calls import NamedCalls
from dovetail_server.parsers.pieces import MAX_SPACE, Marks, after_space
from dovetail_server.parsers.tagged import tag_at

MAX_HEAD = 600  # characters before the arguments


class SectionCalls(NamedCalls):
    """A call may also come without the mark of the section. End marks after a call are dropped,
    and may be missing."""

    section_begin: ClassVar[str]
    section_end: ClassVar[str]
    call_begin: ClassVar[str]
    call_end: ClassVar[str]
    head_pattern: ClassVar[re.Pattern[str]]  # what precedes the arguments
    marks = Marks(" ")
    _marks_after_call: ClassVar[Marks]

    def __init_subclass__(cls) -> None:
        cls.marks = Marks(cls.section_begin, cls.call_begin)
        cls._marks_after_call = Marks(
            cls.section_begin, cls.call_begin, cls.call_end, cls.section_end
        )

    def found(self, mark: str, lead: str) -> None:
        """Begin a section or a call, or drop an end mark after a call."""
        if mark in (self.section_begin, self.call_begin):
            self.marks_now = self.marks
            self.lead = lead
            self._state = type(self).before_call if mark == self.section_begin else type(self).head
        else:
            if mark == self.section_end:
                self.marks_now = self.marks
            self._state = type(self).skip_space

    def before_call(self, text: str, pos: int) -> int:
        """State: the mark of the first call in a section."""
        begin = after_space(text, pos)
        tag: str | None = ""
        if begin - pos > MAX_SPACE:
            tag = None
        elif begin < len(text):
            tag = tag_at(text, begin, (self.call_begin,))
        if tag == "":
            return self.hold(text, pos)
        if tag is None:
            self.refuse("")
            return pos
        end = begin + len(tag)
        self.lead += text[pos:end]
        self._state = type(self).head
        return end

    def head(self, text: str, pos: int) -> int:
        """State: all that precedes the arguments."""
        stop = min(len(text), pos + MAX_HEAD)
        brace = text.find("{", pos, stop)
        if brace < 0 and stop < pos + MAX_HEAD:
            return self.hold(text, pos)
        head = self.head_pattern.fullmatch(text, pos, brace) if brace >= 0 else None
        if head is None:
            self.refuse("")
            return pos
        self.start(head)
        return brace

    def start(self, head: re.Match[str]) -> None:
        """Begin the call after `head`."""
        self.start_call(head["name"], head["id"])

    def after_call(self, *, complete: bool) -> None:
        """Search for end marks, too, from here on."""
        self.marks_now = self._marks_after_call
        super().after_call(complete=complete)

    def finish(self) -> list[Event]:
        """Return the remaining events. A truncated end mark is markup, too."""
        begun = self._held.strip()
        ends = (self.call_end, self.section_end)
        if (
            self.marks_now is self._marks_after_call
            and begun
            and any(end.startswith(begun) for end in ends)
        ):
            self._held = ""
        return super().finish()
