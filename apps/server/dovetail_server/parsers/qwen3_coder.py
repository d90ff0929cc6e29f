"""Tool calls of Qwen3-Coder and Qwen3.5:
`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`."""

from __future__ import annotations

from dovetail.api.parser import ParserCapabilities, ParserExample
from dovetail_server.parsers.pieces import Malformed
from dovetail_server.parsers.tagged import FunctionTagCalls

_FUNCTION = "<function="


class Qwen3CoderCalls(FunctionTagCalls):
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
        ParserExample(
            "<tool_call><function=f>oops</function></tool_call>x",
            "oops</function>x",
            calls=(("f", ""),),
        ),
    )
    malformed = (
        Malformed(
            "no `</parameter>`",
            "the value ends before `<parameter=…>` with a parameter of the function, or "
            "`</function>` with `</tool_call>`",
            ParserExample(
                "<tool_call><function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</function>\n</tool_call>",
                calls=(("f", '{"a": "1", "b": "2"}'),),
            ),
        ),
        Malformed(
            "no `</function>`",
            "`</tool_call>` ends the call",
            ParserExample(
                "<tool_call><function=f><parameter=a>1</parameter></tool_call>",
                calls=(("f", '{"a": "1"}'),),
            ),
        ),
        Malformed(
            "no `</tool_call>`",
            "`</function>` ends the call",
            ParserExample("<tool_call><function=f></function>B", "B", calls=(("f", "{}"),)),
        ),
        Malformed(
            "a value that isn't of its schema's type",
            "it is a string",
            ParserExample(
                "<tool_call><function=f><parameter=n>five</parameter></function></tool_call>",
                calls=(("f", '{"n": "five"}'),),
            ),
        ),
        Malformed(
            "text between the tags",
            "the call ends there, and the rest is content",
            ParserExample(
                "<tool_call><function=f>oops</function></tool_call>",
                "oops</function>",
                calls=(("f", ""),),
            ),
        ),
        Malformed(
            "no `<tool_call>`",
            "all of it is content",
            ParserExample(
                "<function=f></function></tool_call>", "<function=f></function></tool_call>"
            ),
        ),
    )
    function_begin = _FUNCTION
    function_end = ">"
    key_begin = "<parameter="
    key_end = ">"
    value_end = "</parameter>"
    call_ends = ("</function>", "</tool_call>")
    lines = True
