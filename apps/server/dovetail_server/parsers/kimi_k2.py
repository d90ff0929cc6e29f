"""Tool calls of Kimi K2:
`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, any number
within `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`."""

from __future__ import annotations

import re

from dovetail.api.parser import CallForm, ParserCapabilities, ParserExample
from dovetail_server.parsers.json_call import MAX_NAME
from dovetail_server.parsers.pieces import Malformed
from dovetail_server.parsers.section import SectionCalls

_BEGIN = "<|tool_calls_section_begin|><|tool_call_begin|>"
_END = "<|tool_call_end|><|tool_calls_section_end|>"


class KimiK2Calls(SectionCalls):
    """All marks are special tokens. The id of a call is the model's, with the function's name
    and a number, since the template repeats it."""

    section_begin = "<|tool_calls_section_begin|>"
    section_end = "<|tool_calls_section_end|>"
    call_begin = "<|tool_call_begin|>"
    call_end = "<|tool_call_end|>"
    head_pattern = re.compile(
        rf"\s*+(?P<id>(?:functions\.)?(?P<name>[^\s<>{{}}\":]{{1,{MAX_NAME}}})(?::[0-9]{{1,9}})?)\s*<\|tool_call_argument_begin\|>\s*"
    )
    capabilities = ParserCapabilities(
        calls=True, special_tokens=True, templates=(("<|tool_call_argument_begin|>",),)
    )
    examples = (
        ParserExample("Hi <|tool_call|>.", "Hi <|tool_call|>."),
        ParserExample(
            f"{_BEGIN}functions.f:0<|tool_call_argument_begin|>{{}}{_END}", calls=(("f", "{}"),)
        ),
        ParserExample(
            f'A {_BEGIN}functions.f:0<|tool_call_argument_begin|>{{"a": "}}<"}}<|tool_call_end|>'
            f"<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{{}}{_END}",
            "A",
            calls=(("f", '{"a": "}<"}'), ("g", "{}")),
        ),
        ParserExample(f"{_BEGIN}no", f"{_BEGIN}no"),
    )
    malformed = (
        Malformed(
            "no marks of a section",
            "the marks of a call suffice",
            ParserExample(
                '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": '
                "1}<|tool_call_end|>B",
                "B",
                calls=(("f", '{"a": 1}'),),
            ),
        ),
        Malformed(
            "a name without `functions.` or number",
            "it is a call",
            ParserExample(f"{_BEGIN}f<|tool_call_argument_begin|>{{}}{_END}", calls=(("f", "{}"),)),
        ),
        Malformed(
            "no end marks",
            "the call ends with its last brace",
            ParserExample(
                f"{_BEGIN}functions.f:0<|tool_call_argument_begin|>{{}} B",
                "B",
                calls=(("f", "{}"),),
            ),
        ),
        Malformed(
            "no `<|tool_call_argument_begin|>`",
            "all of it is content",
            ParserExample(f"{_BEGIN}f {{}}", f"{_BEGIN}f {{}}"),
        ),
    )

    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return CallForm(
            lambda name: (f"{_BEGIN}functions.{name}:0<|tool_call_argument_begin|>", _END),
            cls.section_begin,
            marked=True,
        )
