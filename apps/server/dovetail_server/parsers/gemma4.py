"""Tool calls of Gemma 4: `<|tool_call>call:f{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`.

Keys have no quotes, and strings stand between marks, within which nothing is escaped. Arguments
are converted to JSON as they arrive.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import BaseModel

from dovetail.api.parser import (
    Event,
    ParserCapabilities,
    ParserContext,
    ParserExample,
    ToolCallStart,
)
from dovetail_server.parsers.calls import ClosedCalls
from dovetail_server.parsers.json_call import MAX_NAME, JsonValue
from dovetail_server.parsers.pieces import Malformed, Marks, after_space
from dovetail_server.parsers.tagged import QUOTE, as_json, quoted, tag_at

MAX_HEAD = 300  # characters before the arguments
_HEAD = re.compile(rf'call:\s*([^\s<>{{}}":]{{1,{MAX_NAME}}})\s*')
_KEY = re.compile(r'\s*"?([^\s"{}\[\],<>](?:[^"{}\[\],<>\n]*[^\s"{}\[\],<>])?)"?\s*')
_AFTER_SCALAR = re.compile(r"[,}\]<\n]")
_CLOSING = {"{": "}", "[": "]"}


class Gemma4Calls(ClosedCalls):
    """All marks are special tokens. A call begins with its name and brace; from then on anything
    but arguments ends it."""

    begin = "<|tool_call>"
    end = "<tool_call|>"
    string_mark: ClassVar[str] = '<|"|>'
    capabilities = ParserCapabilities(
        calls=True, special_tokens=True, templates=((begin, string_mark),)
    )
    examples: ClassVar[tuple[ParserExample, ...]] = (
        ParserExample("Hi call:f{}.", "Hi call:f{}."),
        ParserExample("<|tool_call>call:f{}<tool_call|>", calls=(("f", "{}"),)),
        ParserExample(
            'A <|tool_call>call:f{a:<|"|>}"\n<|"|>,n:-1.5,b:true}<tool_call|><|tool_call>call:g{l:[1,<|"|>x<|"|>],o:{k:null}}<tool_call|>B',
            "AB",
            calls=(
                ("f", '{"a": "}\\"\\n", "n": -1.5, "b": true}'),
                ("g", '{"l": [1, "x"], "o": {"k": null}}'),
            ),
        ),
        ParserExample("<|tool_call>no<tool_call|>", "<|tool_call>no<tool_call|>"),
    )
    malformed: ClassVar[tuple[Malformed, ...]] = (
        Malformed(
            "quotes of JSON",
            "they are read as in JSON",
            ParserExample(
                '<|tool_call>call:f{"a": "x\\n", "n": 1}<tool_call|>',
                calls=(("f", '{"a": "x\\n", "n": 1}'),),
            ),
        ),
        Malformed(
            "a string without marks",
            "it is a string",
            ParserExample(
                "<|tool_call>call:f{a:New York,n:True}<tool_call|>",
                calls=(("f", '{"a": "New York", "n": true}'),),
            ),
        ),
        Malformed(
            "no last brace",
            "the call ends at the mark, without a brace",
            ParserExample("<|tool_call>call:f{n:1<tool_call|>B", "B", calls=(("f", '{"n": 1'),)),
        ),
        Malformed(
            "a comma after the last argument",
            "it is dropped",
            ParserExample("<|tool_call>call:f{n:1,}", calls=(("f", '{"n": 1}'),)),
        ),
        Malformed(
            "no `call:`",
            "all of it is content",
            ParserExample("<|tool_call>f{}<tool_call|>", "<|tool_call>f{}<tool_call|>"),
        ),
    )

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._open: list[str] = []  # brackets of the current call's arguments
        self._is_first = True  # in the innermost bracket
        self._string_end = Marks(self.string_mark)
        self._plain: JsonValue | None = None  # a string in JSON

    @property
    def in_call(self) -> bool:
        return bool(self._open)

    def finish(self) -> list[Event]:
        """Return the remaining events. Held text of a truncated call is dropped."""
        if self._open:
            self._held = ""
        return super().finish()

    def begins_call(self, char: str) -> bool:
        """Accept the first letter of `call:`."""
        if char == "c":
            self._state = type(self).head
        return char == "c"

    def head(self, text: str, pos: int) -> int:
        """State: the name, up to the brace."""
        stop = min(len(text), pos + MAX_HEAD)
        brace = text.find("{", pos, stop)
        if brace < 0 and stop < pos + MAX_HEAD:
            return self.hold(text, pos)
        head = _HEAD.fullmatch(text, pos, brace) if brace >= 0 else None
        if head is None:
            self.refuse("")
            return pos
        self._events.append(ToolCallStart(self.index, self.new_id(), head[1]))
        self.lead = ""
        return self._open_bracket(text, brace)

    def key(self, text: str, pos: int) -> int:
        """State: a key, or the brace after the last."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == "}":
            return self._close_bracket(pos)
        stop = min(len(text), pos + MAX_NAME)
        colon = text.find(":", pos, stop)
        if colon < 0 and stop < pos + MAX_NAME:
            return self.hold(text, pos)
        bare = text[pos:colon].replace(self.string_mark, QUOTE) if colon >= 0 else ""
        key = _KEY.fullmatch(bare)
        if key is None:
            return self._end_call(pos, complete=False)
        self.write_arguments(f"{'' if self._is_first else ', '}{quoted(key[1])}: ")
        self._state = type(self).value
        return colon + 1

    def element(self, text: str, pos: int) -> int:
        """State: an element of an array, or the bracket after the last."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == "]":
            return self._close_bracket(pos)
        if not self._is_first:
            self.write_arguments(", ")
        self._state = type(self).value
        return pos

    def value(self, text: str, pos: int) -> int:
        """State: a value's first character."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] in _CLOSING:
            return self._open_bracket(text, pos)
        if text[pos] == QUOTE:
            self._plain = JsonValue(QUOTE)
            self._state = type(self).plain_string
            return pos
        tag = tag_at(text, pos, (self.string_mark,))
        if tag == "":
            return self.hold(text, pos)
        if tag is None:
            self._state = type(self).scalar
            return pos
        self.write_arguments(QUOTE)
        self._state = type(self).string
        return pos + len(tag)

    def string(self, text: str, pos: int) -> int:
        """State: a string, up to its mark."""
        match = self._string_end.find(text, pos)
        end = match.start() if match else self._string_end.certain(text, pos)
        self.write_arguments(quoted(text[pos:end])[1:-1])
        if match is None:
            return self.hold(text, end)
        self.write_arguments(QUOTE)
        self._after_value()
        return match.end()

    def plain_string(self, text: str, pos: int) -> int:
        """State: a string in JSON."""
        if self._plain is None:
            raise AssertionError("a string is read that never began")
        end = self._plain.feed(text, pos)
        self.write_arguments(text[pos:end])
        if self._plain.done:
            self._after_value()
        return end

    def scalar(self, text: str, pos: int) -> int:
        """State: a number, a constant, or a short string without marks."""
        stop = min(len(text), pos + MAX_NAME)
        match = _AFTER_SCALAR.search(text, pos, stop)
        if match is None and stop < pos + MAX_NAME:
            return self.hold(text, pos)
        if match is None or match.start() == pos:
            return self._end_call(pos, complete=False)
        self.write_arguments(as_json(text[pos : match.start()]))
        self._after_value()
        return match.start()

    def after_value(self, text: str, pos: int) -> int:
        """State: a comma or a closing bracket."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == ",":
            self._next()
            return pos + 1
        if text[pos] == _CLOSING[self._open[-1]]:
            return self._close_bracket(pos)
        return self._end_call(pos, complete=False)

    def _open_bracket(self, text: str, pos: int) -> int:
        self._open.append(text[pos])
        self.write_arguments(text[pos])
        self._is_first = True
        self._next()
        return pos + 1

    def _close_bracket(self, pos: int) -> int:
        self.write_arguments(_CLOSING[self._open.pop()])
        if not self._open:
            return self._end_call(pos + 1, complete=True)
        self._after_value()
        return pos + 1

    def _next(self) -> None:
        """Expect the next key or element."""
        self._state = type(self).key if self._open[-1] == "{" else type(self).element

    def _after_value(self) -> None:
        self._is_first = False
        self._state = type(self).after_value

    def _end_call(self, pos: int, *, complete: bool) -> int:
        self._open.clear()
        self.index += 1
        self.after_call(complete=complete)
        return pos
