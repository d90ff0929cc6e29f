"""`TaggedCalls`: base of formats that write arguments between tags, without quotes. They are converted to JSON incrementally. `Parameters` says which
parameters of a request's tools accept strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel

from dovetail.api.parser import MAX_HELD, Event, ParserContext, ToolCallArguments, ToolCallStart
from dovetail_server.parsers.calls import CALL_END, ClosedCalls
from dovetail_server.parsers.json_call import MAX_NAME
from dovetail_server.parsers.pieces import Marks, after_space

QUOTE = '"'
_AS_IN_PYTHON = {"True": "true", "False": "false", "None": "null"}  # some models write Python's constants
_DEEPEST = 8  # nested alternatives and references


class Parameters:
    """Schemas of all functions' parameters. They come from the client: anything that isn't a schema is ignored."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}  # by function
        for tool in tools:
            function = _mapping(_mapping(tool).get("function"))
            self._schemas[str(function.get("name"))] = _mapping(function.get("parameters"))

    def take_text(self, function: str, parameter: str) -> bool:
        """Return True if the parameter accepts strings, or is unknown."""
        schema = self._schemas.get(function, {})
        return _takes_text(_mapping(schema.get("properties")).get(parameter), schema, _DEEPEST)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _takes_text(value: Any, root: Mapping[str, Any], depth: int) -> bool:
    schema = _mapping(value)
    if depth == 0:
        return True
    if isinstance(reference := schema.get("$ref"), str):
        return _takes_text(_referred(reference, root), root, depth - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(word), list) and several:
            return any(_takes_text(one, root, depth - 1) for one in several)
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(one, str) for one in values)
    kinds = schema.get("type", "string")
    return "string" in kinds if isinstance(kinds, list) else kinds == "string"


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        value = _mapping(value).get(name)
    return value


class TaggedCalls(ClosedCalls):
    """Subclasses define the tags, and parse the function's name. A call is emitted once its name is certain; from then on anything but one of its
    tags ends it.

    A value is a string if the tool's schema allows one or doesn't specify it, and is emitted as it arrives. Otherwise it is held until its end, at
    most MAX_HELD characters; it is emitted unchanged if it is JSON, otherwise as a string.
    """

    key_begin: ClassVar[str]
    key_end: ClassVar[str]
    value_begin: ClassVar[str | None] = None  # None: values directly follow keys
    value_end: ClassVar[Marks]
    call_ends: ClassVar[tuple[str, ...]]
    lines: ClassVar[bool] = False  # True: a value's first and last line break are markup

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._parameters = Parameters(context.tools)
        self._function: str | None = None  # of the current call
        self._first = True  # before the first argument
        self._key = ""
        self._is_text = True  # the current value
        self._value: list[str] = []  # its text, if not a string
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
            self._write("{}" if self._first else "}")
            self._end_call(complete=True)
            if tag == CALL_END:
                self.marks_now = self.marks  # already seen
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
        """State: a value, up to its end tag."""
        match = self.value_end.find(text, pos)
        end = match.start() if match else self.value_end.certain(text, pos)
        if self.lines and end > pos and text[end - 1] == "\n":
            end -= 1
        self._grow(text[pos:end])
        if match is None:
            return self.hold(text, end)
        self._write(QUOTE if self._is_text else _json("".join(self._value)))
        self._value.clear()
        self._state = type(self).between
        return match.end()

    def _begin_value(self) -> None:
        self._is_text = self._parameters.take_text(self._function or "", self._key)
        self._value_size = 0
        self._write(f"{'{' if self._first else ', '}{_quoted(self._key)}: {QUOTE if self._is_text else ''}")
        self._first = False
        self._state = type(self).first_line if self.lines else type(self).value

    def _grow(self, piece: str) -> None:
        if not self._is_text:
            self._value.append(piece)
            self._value_size += len(piece)
            if self._value_size <= MAX_HELD:
                return
            self._is_text = True
            piece = "".join(self._value)
            self._value.clear()
            self._write(QUOTE)
        self._write(_quoted(piece)[1:-1])

    def _write(self, text: str) -> None:
        """Append to the call's arguments."""
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments):
            self._events[-1] = ToolCallArguments(self.index, last.text + text)
        elif text:
            self._events.append(ToolCallArguments(self.index, text))

    def _end_call(self, *, complete: bool) -> None:
        self._function = None
        self.index += 1
        self.after_call(complete=complete)


def tag_at(text: str, pos: int, tags: tuple[str, ...]) -> str | None:
    """Return the tag that begins at `pos`; None if none does; an empty string if the text ends before that is certain."""
    for tag in tags:
        if text.startswith(tag, pos):
            return tag
    return "" if any(tag.startswith(text[pos : pos + len(tag)]) for tag in tags) else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(text: str) -> str:
    """Return a value as JSON."""
    value = text.strip()
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _AS_IN_PYTHON.get(value) or _quoted(text)
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")
