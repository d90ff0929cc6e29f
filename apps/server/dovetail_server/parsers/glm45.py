"""Tool calls of GLM-4.5 to 4.7:
`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`."""

from __future__ import annotations

import re

from dovetail.api.parser import ParserCapabilities, ParserExample
from dovetail_server.parsers.json_call import MAX_NAME
from dovetail_server.parsers.pieces import MAX_SPACE, Malformed
from dovetail_server.parsers.tagged import TaggedCalls, tag_at

_HEAD = re.compile(rf'([^\s<>{{}}"]{{1,{MAX_NAME}}})[ \t\r\n]{{0,{MAX_SPACE}}}')


class Glm45Calls(TaggedCalls):
    """All marks are added tokens that aren't special. A name begins a call only if one of its tags
    follows."""

    capabilities = ParserCapabilities(calls=True, templates=(("<tool_call>", "<arg_key>"),))
    examples = (
        ParserExample("Hi <arg_key>.", "Hi <arg_key>."),
        ParserExample("<tool_call>f\n</tool_call>", calls=(("f", "{}"),)),
        ParserExample(
            "A\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>\n</a</arg_value>\n</tool_call><tool_call>g</tool_call>",
            "A",
            calls=(("f", '{"s": "\\n</a"}'), ("g", "{}")),
        ),
        ParserExample(
            "<tool_call>f<arg_key>j</arg_key><arg_value> [] </arg_value></tool_call>B",
            "B",
            calls=(("f", '{"j": []}'),),
        ),
        ParserExample(
            "<tool_call>no call <tool_call>g</tool_call>",
            "<tool_call>no call",
            calls=(("g", "{}"),),
        ),
        ParserExample("<tool_call>f<arg_value></tool_call>", "<tool_call>f<arg_value></tool_call>"),
    )
    malformed = (
        Malformed(
            "no `</arg_value>`",
            "the value ends before `<arg_key>…</arg_key><arg_value>` with a parameter of the "
            "function, or `</tool_call>`",
            ParserExample(
                "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</tool_call>",
                calls=(("f", '{"a": "1", "b": "2"}'),),
            ),
        ),
        Malformed(
            "a value that isn't of its schema's type",
            "it is a string",
            ParserExample(
                "<tool_call>f<arg_key>n</arg_key><arg_value>five</arg_value></tool_call>",
                calls=(("f", '{"n": "five"}'),),
            ),
        ),
        Malformed(
            "text between the tags",
            "the call ends there, and the rest is content",
            ParserExample(
                "<tool_call>f<arg_key>a</arg_key>oops</tool_call>", "oops", calls=(("f", ""),)
            ),
        ),
        Malformed(
            "a name without a tag after it",
            "all of it is content",
            ParserExample("<tool_call>f {}", "<tool_call>f {}"),
        ),
        Malformed(
            "no `</tool_call>`",
            "the call is cut off",
            ParserExample(
                "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>",
                calls=(("f", '{"a": "1"'),),
            ),
        ),
    )
    key_begin = "<arg_key>"
    key_end = "</arg_key>"
    value_begin = "<arg_value>"
    value_end = "</arg_value>"
    call_ends = ("</tool_call>",)

    def begins_call(self, char: str) -> bool:
        """Accept anything but a tag as a name."""
        if char != "<":
            self._state = type(self).head
        return char != "<"

    def head(self, text: str, pos: int) -> int:
        """State: the function's name, up to the tag after it."""
        end = text.find("<", pos)
        head = _HEAD.fullmatch(text, pos, end if end >= 0 else len(text))
        tag = (
            None
            if head is None
            else tag_at(text, end, (self.key_begin, *self.call_ends))
            if end >= 0
            else ""
        )
        if tag == "":
            return self.hold(text, pos)
        if tag is None or head is None:
            self.refuse("")
            return pos
        self.start_call(head[1])
        return end
