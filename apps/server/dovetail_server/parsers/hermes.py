"""Tool calls of Hermes and Qwen models: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

from __future__ import annotations

import json

from dovetail.api.parser import CallForm, ParserCapabilities, ParserExample
from dovetail_server.parsers.calls import ClosedCalls
from dovetail_server.parsers.pieces import Malformed


class HermesCalls(ClosedCalls):
    """A call ends with its last brace."""

    capabilities = ParserCapabilities(calls=True, templates=(("<tool_call>",),))
    examples = (
        ParserExample(
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
            calls=(("f", '{"a": 1}'),),
        ),
        ParserExample("Hi.", "Hi."),
        ParserExample('<tool_call>{"name":"f","arguments":{}}</tool_call>', calls=(("f", "{}"),)),
        ParserExample(
            'A\n<tool_call>\n{"name": "f", "arguments": {"a": '
            '"}\\"<"}}\n</tool_call>\n<tool_call>{"name":"g"}</tool_call>',
            "A",
            calls=(("f", '{"a": "}\\"<"}'), ("g", "{}")),
        ),
        ParserExample(
            '<tool_call>{"arguments":[1],"name":"f"}</tool_call>B', "B", calls=(("f", "[1]"),)
        ),
        ParserExample("a <tool_cal> <<tool_call", "a <tool_cal> <<tool_call"),
        ParserExample("<tool_call>no</tool_call>", "<tool_call>no</tool_call>"),
        ParserExample('<tool_call>{"name": "f", oops</tool_call> so', "oopsso", calls=(("f", ""),)),
    )
    malformed = (
        Malformed(
            "no end mark",
            "the call ends with its last brace",
            ParserExample('<tool_call>{"name": "f", "arguments": {}} B', "B", calls=(("f", "{}"),)),
        ),
        Malformed(
            "no arguments",
            "they are `{}`",
            ParserExample('<tool_call>{"name": "f"}</tool_call>', calls=(("f", "{}"),)),
        ),
        Malformed(
            "arguments that aren't an object",
            "passed on unchanged",
            ParserExample(
                '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', calls=(("f", '"x"'),)
            ),
        ),
        Malformed(
            "invalid JSON up to the name",
            "all of it is content",
            ParserExample(
                '<tool_call>{name: "f"}</tool_call>', '<tool_call>{name: "f"}</tool_call>'
            ),
        ),
        Malformed(
            "invalid JSON after the name",
            "the call ends there, and the rest is content",
            ParserExample('<tool_call>{"name": "f", oops</tool_call>', "oops", calls=(("f", ""),)),
        ),
        Malformed(
            "text after the last brace",
            "it is content",
            ParserExample(
                '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}", calls=(("f", "{}"),)
            ),
        ),
        Malformed(
            "a mark before the mark",
            "the first one is content",
            ParserExample(
                '<tool_call><tool_call>{"name": "f"}</tool_call>',
                "<tool_call>",
                calls=(("f", "{}"),),
            ),
        ),
    )

    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return CallForm(_around, "<tool_call>", separator="\n", marked=True)


def _around(name: str) -> tuple[str, str]:
    return (
        f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
        "}\n</tool_call>",
    )
