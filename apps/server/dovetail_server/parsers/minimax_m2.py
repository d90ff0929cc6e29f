"""Tool calls of MiniMax-M2: `<minimax:tool_call><invoke name="f"><parameter
name="key">value</parameter>…</invoke>…</minimax:tool_call>`."""

from __future__ import annotations

from dovetail.api.parser import ParserCapabilities, ParserExample
from dovetail_server.parsers.pieces import Malformed
from dovetail_server.parsers.tagged import FunctionTagCalls


class MinimaxM2Calls(FunctionTagCalls):
    """Several functions may be in one block. The marks are ordinary added tokens or plain text."""

    begin = "<minimax:tool_call>"
    end = "</minimax:tool_call>"
    capabilities = ParserCapabilities(calls=True, templates=((begin,),))
    examples = (
        ParserExample('Hi <invoke name="f">.', 'Hi <invoke name="f">.'),
        ParserExample(
            '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
            calls=(("f", "{}"),),
        ),
        ParserExample(
            'A\n<minimax:tool_call>\n<invoke name="f">\n<parameter '
            'name="s">\n</p</parameter>\n</invoke>\n'
            '<invoke name="g">\n<parameter '
            'name="j">[1]</parameter>\n</invoke>\n</minimax:tool_call>B',
            "AB",
            calls=(("f", '{"s": "\\n</p"}'), ("g", '{"j": [1]}')),
        ),
        ParserExample("<minimax:tool_call>no", "<minimax:tool_call>no"),
    )
    malformed = (
        Malformed(
            "no `</parameter>`",
            'the value ends before `<parameter name="…">` with a parameter of the function, or '
            "`</invoke>` with `</minimax:tool_call>`",
            ParserExample(
                '<minimax:tool_call><invoke name="f"><parameter name="a">1<parameter '
                'name="b">2</invoke></minimax:tool_call>',
                calls=(("f", '{"a": "1", "b": "2"}'),),
            ),
        ),
        Malformed(
            "no `</minimax:tool_call>`",
            "`</invoke>` ends the call",
            ParserExample(
                '<minimax:tool_call><invoke name="f"></invoke>B', "B", calls=(("f", "{}"),)
            ),
        ),
        Malformed(
            "no `</invoke>`",
            "`</minimax:tool_call>` ends the call",
            ParserExample(
                '<minimax:tool_call><invoke name="f"><parameter '
                'name="a">1</parameter></minimax:tool_call>',
                calls=(("f", '{"a": "1"}'),),
            ),
        ),
        Malformed(
            "text between the tags",
            "the call ends there, and the rest is content",
            ParserExample(
                '<minimax:tool_call><invoke name="f">oops</invoke></minimax:tool_call>',
                "oops</invoke>",
                calls=(("f", ""),),
            ),
        ),
    )
    function_begin = '<invoke name="'
    function_end = '">'
    key_begin = '<parameter name="'
    key_end = '">'
    value_end = "</parameter>"
    call_ends = ("</invoke>", end)
