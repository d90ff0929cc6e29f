"""Tool calls of Nemotron-H and Nemotron Nano 2: `<TOOLCALL>[{"name": …, "arguments": …},
…]</TOOLCALL>`."""

from __future__ import annotations

import json

from dovetail.api.parser import CallForm, ParserCapabilities, ParserExample
from dovetail_server.parsers.calls import ArrayCalls, ClosedCalls
from dovetail_server.parsers.pieces import Malformed


class NemotronHCalls(ArrayCalls, ClosedCalls):
    """The marks are plain text."""

    begin = "<TOOLCALL>"
    end = "</TOOLCALL>"
    capabilities = ParserCapabilities(calls=True, templates=((begin,),))
    examples = (
        ParserExample("Hi [].", "Hi []."),
        ParserExample(
            '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', calls=(("f", "{}"),)
        ),
        ParserExample(
            'A\n<TOOLCALL>[{"name":"f","arguments":{"a":"]"}}, {"arguments":{"b": '
            '[1]},"name":"g"}]</TOOLCALL> B',
            "AB",
            calls=(("f", '{"a":"]"}'), ("g", '{"b": [1]}')),
        ),
        ParserExample("<TOOLCALL>no</TOOLCALL>", "<TOOLCALL>no</TOOLCALL>"),
    )
    malformed = (
        Malformed(
            "a call without an array",
            "it is a call",
            ParserExample(
                '<TOOLCALL>{"name": "f", "arguments": {}}</TOOLCALL>', calls=(("f", "{}"),)
            ),
        ),
        Malformed(
            "no bracket after the array",
            "the last call ends with its last brace",
            ParserExample(
                '<TOOLCALL>[{"name": "f", "arguments": {}}</TOOLCALL>B', "B", calls=(("f", "{}"),)
            ),
        ),
        Malformed(
            "no `</TOOLCALL>`",
            "the bracket ends the calls",
            ParserExample('<TOOLCALL>[{"name": "f"}] B', "B", calls=(("f", "{}"),)),
        ),
        Malformed(
            "an empty array",
            "all of it is content",
            ParserExample("<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>"),
        ),
        Malformed(
            "invalid JSON after the name",
            "the call ends there, and the rest is content",
            ParserExample(
                '<TOOLCALL>[{"name": "f", oops}]</TOOLCALL>', "oops}]", calls=(("f", ""),)
            ),
        ),
    )

    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return CallForm(_around, cls.begin, marked=True, single=True)

    def begins_call(self, char: str) -> bool:
        """Accept an array, or a single call."""
        if char == "[" and not self.in_array:
            self._state = type(self).open_array
            return True
        return super().begins_call(char)


def _around(name: str) -> tuple[str, str]:
    return (
        f'<TOOLCALL>[{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
        "}]</TOOLCALL>",
    )
