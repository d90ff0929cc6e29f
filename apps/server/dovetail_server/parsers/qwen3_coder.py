"""Tool calls of Qwen3-Coder and Qwen3.5: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`."""

from __future__ import annotations

import re

from dovetail.api.parser import ParserCapabilities, ParserExample
from dovetail_server.parsers.json_call import MAX_NAME
from dovetail_server.parsers.pieces import Marks
from dovetail_server.parsers.tagged import TaggedCalls, tag_at

_FUNCTION = "<function="
_NAME = re.compile(r'[^\s<>{}"]+')


class Qwen3CoderCalls(TaggedCalls):
    """Tags and values are on separate lines. The marks are ordinary added tokens or plain text."""

    capabilities = ParserCapabilities(calls=True, templates=(("<tool_call>", _FUNCTION),))
    examples = (
        ParserExample("Hi <function=f>.", "Hi <function=f>."),
        ParserExample("<tool_call>\n<function=f>\n</function>\n</tool_call>", calls=(("f", "{}"),)),
        ParserExample(
            "A\n<tool_call><function=f>\n<parameter=s>\n</p\n</parameter>\n</function></tool_call>\n<tool_call><function=g></function>",
            "A",
            calls=(("f", '{"s": "</p"}'), ("g", "{}")),
        ),
        ParserExample(
            "<tool_call><function=f><parameter=j>{}</parameter><parameter=u>1\n\n</parameter></function>B",
            "B",
            calls=(("f", '{"j": {}, "u": "1\\n"}'),),
        ),
        ParserExample("<tool_call> <function no", "<tool_call> <function no"),
        ParserExample("<tool_call><function=f>oops</function></tool_call>x", "oops</function>x", calls=(("f", ""),)),
    )
    key_begin = "<parameter="
    key_end = ">"
    value_end = Marks("</parameter>")
    call_ends = ("</function>", "</tool_call>")
    lines = True

    def begins_call(self, char: str) -> bool:
        """Accept the first character of a tag; the tag decides."""
        if char == "<":
            self._state = type(self).function
        return char == "<"

    def function(self, text: str, pos: int) -> int:
        """State: the tag with the function's name."""
        tag = tag_at(text, pos, (_FUNCTION,))
        begin = pos + len(_FUNCTION)
        end = text.find(">", begin, begin + MAX_NAME + 1)
        if tag == "" or (tag and end < 0 and len(text) - begin <= MAX_NAME):
            return self.hold(text, pos)
        if tag is None or end < 0 or not _NAME.fullmatch(text, begin, end):
            self.refuse("")
            return pos
        self.start_call(text[begin:end])
        return end + 1
