"""`TaggedCalls`: base of formats that write arguments between tags, without quotes. They are
converted to JSON incrementally."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from pydantic import BaseModel

from dovetail.api.parser import MAX_HELD, Event, ParserContext, ToolCallStart
from dovetail_server.parsers.calls import ClosedCalls
from dovetail_server.parsers.json_call import MAX_NAME
from dovetail_server.parsers.pieces import MAX_SPACE, after_space
from dovetail_server.parsers.schema_kinds import CONSTANTS, Parameters, Reading

QUOTE = '"'
_NAME = re.compile(r'[^\s<>{}"]+')
_UNCERTAIN = -1  # more text is needed


class TaggedCalls(ClosedCalls):
    """Subclasses define the tags, and parse the function's name. A call is emitted once its name is
    certain; from then on anything but one of its tags ends it.

    A value is a string if the tool's schema allows one or doesn't specify it. It is emitted as it
    arrives, unless it may still be a constant that the schema allows, too, such as `null`. Other
    values are held until their end, at most MAX_HELD characters, and emitted unchanged if they are
    JSON, otherwise as a string.

    A value ends at `value_end`. Models forget it, so it also ends before the tag of a parameter of
    the function, and before all of `call_ends`.
    """

    key_begin: ClassVar[str]
    key_end: ClassVar[str]
    value_begin: ClassVar[str | None] = None  # None: values directly follow keys
    value_end: ClassVar[str]
    call_ends: ClassVar[tuple[str, ...]]  # in the order in which they are written
    lines: ClassVar[bool] = False  # True: a value's first and last line break are markup

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._parameters = Parameters(context.tools)
        self._function: str | None = None  # of the current call
        self._first = True  # before the first argument
        self._key = ""
        self._reading = Reading(is_text=True)  # of the current value
        self._holds = False  # its text is held, since it may not be a string
        self._value: list[str] = []  # held text
        self._value_size = 0

    @property
    def in_call(self) -> bool:
        return self._function is not None

    def finish(self) -> list[Event]:
        """Return the remaining events. Held text of a truncated call is dropped."""
        if self._function is not None:
            self._held = ""
        return super().finish()

    def start_call(self, name: str) -> None:
        """Emit a call's start."""
        self._events.append(ToolCallStart(self.index, self.new_id(), name))
        self.lead = ""
        self._function = name
        self._first = True
        self._state = type(self).between

    def between(self, text: str, pos: int) -> int:
        """State: before, between and after arguments."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        tag = tag_at(text, pos, (self.key_begin, *self.call_ends))
        if tag == "":
            return self.hold(text, pos)
        if tag is None:
            self._end_call(complete=False)
            return pos
        if tag == self.key_begin:
            self._state = type(self).key
        else:
            self.write_arguments("{}" if self._first else "}")
            self._end_call(complete=True)
            if tag == self.end:
                self.marks_now = self.marks  # already seen
                self._state = type(self).skip_space
        return pos + len(tag)

    def key(self, text: str, pos: int) -> int:
        """State: a parameter's name."""
        end = text.find(self.key_end, pos, pos + MAX_NAME + len(self.key_end))
        if end < 0:
            if len(text) - pos < MAX_NAME + len(self.key_end):
                return self.hold(text, pos)
            self._end_call(complete=False)
            return pos
        self._key = text[pos:end].strip()
        if self.value_begin is None:
            self._begin_value()
        else:
            self._state = type(self).before_value
        return end + len(self.key_end)

    def before_value(self, text: str, pos: int) -> int:
        """State: between a key and its value."""
        pos = after_space(text, pos)
        if pos == len(text) or self.value_begin is None:
            return pos
        tag = tag_at(text, pos, (self.value_begin,))
        if tag == "":
            return self.hold(text, pos)
        if tag is None:
            self._end_call(complete=False)
            return pos
        self._begin_value()
        return pos + len(tag)

    def first_line(self, text: str, pos: int) -> int:
        """State: a value's first character."""
        self._state = type(self).value
        return pos + 1 if text[pos] == "\n" else pos

    def value(self, text: str, pos: int) -> int:
        """State: a value, up to its end."""
        end, length = self._find_end(text, pos)
        content_end = end - 1 if self.lines and end > pos and text[end - 1] == "\n" else end
        self._grow(text[pos:content_end])
        if length == _UNCERTAIN:
            return self.hold(text, content_end)
        self.write_arguments(self._held_value() if self._holds else QUOTE)
        self._value.clear()
        self._state = type(self).between
        return end + length

    def _find_end(self, text: str, pos: int) -> tuple[int, int]:
        """Return the position up to which `text` certainly is the value, and the length of the end
        tag there."""
        begin = text.find("<", pos)
        while begin >= 0:
            length = self._end_at(text, begin)
            if length is not None:
                return begin, length
            begin = text.find("<", begin + 1)
        return len(text), _UNCERTAIN

    def _end_at(self, text: str, pos: int) -> int | None:
        """Return the length of the end tag if the value ends at `pos`, 0 if it ends there without
        one; None if it doesn't end there; _UNCERTAIN if the text ends before that is known."""
        tag = tag_at(text, pos, (self.value_end, self.key_begin, self.call_ends[0]))
        if tag == self.key_begin:
            return self._key_at(text, pos + len(tag))
        if tag == self.call_ends[0]:
            return _tags_at(text, pos, self.call_ends)
        return len(tag) or _UNCERTAIN if tag is not None else None

    def _key_at(self, text: str, pos: int) -> int | None:
        """Return 0 if the name of a parameter of the function is at `pos`, and its value follows;
        otherwise like `_end_at`."""
        end = text.find(self.key_end, pos, pos + MAX_NAME + len(self.key_end))
        if end < 0:
            return _UNCERTAIN if len(text) - pos < MAX_NAME + len(self.key_end) else None
        if not self._parameters.has(self._function or "", text[pos:end].strip()):
            return None
        return (
            0
            if self.value_begin is None
            else _tags_at(text, end + len(self.key_end), (self.value_begin,))
        )

    def _begin_value(self) -> None:
        self._reading = self._parameters.reading(self._function or "", self._key)
        self._holds = not self._reading.is_text or bool(self._reading.constants)
        self._value_size = 0
        self.write_arguments(
            f"{'{' if self._first else ', '}{quoted(self._key)}: {'' if self._holds else QUOTE}"
        )
        self._first = False
        self._state = type(self).first_line if self.lines else type(self).value

    def _grow(self, piece: str) -> None:
        if self._holds:
            self._value.append(piece)
            self._value_size += len(piece)
            if self._value_size <= MAX_HELD and self._may_be_other():
                return
            self._holds = False
            piece = "".join(self._value)
            self._value.clear()
            self.write_arguments(QUOTE)
        self.write_arguments(quoted(piece)[1:-1])

    def _may_be_other(self) -> bool:
        """Return True if the held text may not be a string."""
        return not self._reading.is_text or self._reading.may_be_constant("".join(self._value))

    def _held_value(self) -> str:
        text = "".join(self._value)
        return (
            (self._reading.constants.get(text.strip()) or quoted(text))
            if self._reading.is_text
            else as_json(text)
        )

    def _end_call(self, *, complete: bool) -> None:
        self._function = None
        self.index += 1
        self.after_call(complete=complete)


class FunctionTagCalls(TaggedCalls):
    """Formats with a tag that names the function. Several functions may follow a mark."""

    function_begin: ClassVar[str]
    function_end: ClassVar[str]

    def begins_call(self, char: str) -> bool:
        """Accept the first character of a tag; the tag decides."""
        if char == "<":
            self._state = type(self).function
        return char == "<"

    def function(self, text: str, pos: int) -> int:
        """State: the tag with the function's name."""
        tag = tag_at(text, pos, (self.function_begin,))
        begin = pos + len(self.function_begin)
        longest = MAX_NAME + len(self.function_end)
        end = text.find(self.function_end, begin, begin + longest)
        may_end = end < 0 and len(text) - begin < longest
        if tag == "" or (tag and may_end):
            return self.hold(text, pos)
        if tag is None or end < 0 or not _NAME.fullmatch(text, begin, end):
            self.refuse("")
            return pos
        self.start_call(text[begin:end])
        return end + len(self.function_end)

    def after_call(self, *, complete: bool) -> None:
        """Expect another function."""
        super().after_call(complete=complete)
        if complete:
            self._state = type(self).next_function

    def next_function(self, text: str, pos: int) -> int:
        """State: whitespace, and perhaps the tag of another function."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        tag = tag_at(text, pos, (self.function_begin,))
        if tag == "":
            return self.hold(text, pos)
        self._state = type(self).search if tag is None else type(self).function
        return pos


def tag_at(text: str, pos: int, tags: tuple[str, ...]) -> str | None:
    """Return the tag that begins at `pos`; None if none does; an empty string if the text ends
    before that is certain."""
    for tag in tags:
        if text.startswith(tag, pos):
            return tag
    return "" if any(tag.startswith(text[pos : pos + len(tag)]) for tag in tags) else None


def _tags_at(text: str, pos: int, tags: Sequence[str]) -> int | None:
    """Return 0 if these tags are at `pos`, one after the other; None if they aren't; _UNCERTAIN if
    the text ends before that is known."""
    for tag in tags:
        begin = after_space(text, pos)
        found = tag_at(text, begin, (tag,)) if begin < len(text) else ""
        if found is None or begin - pos > MAX_SPACE:
            return None
        if found == "":
            return _UNCERTAIN
        pos = begin + len(found)
    return 0


def quoted(text: str) -> str:
    """Return a text as JSON's string."""
    return json.dumps(text, ensure_ascii=False)


def as_json(text: str) -> str:
    """Return a value as JSON."""
    value = text.strip()
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return CONSTANTS.get(value) or quoted(text)
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")
