"""Tool calls of Llama 3 models: the whole answer is `{"name": …, "parameters": {…}}`, several are
separated by `;`, `,` or whitespace.

`<|python_tag|>` may precede the first one.
"""

from __future__ import annotations

import json

from pydantic import BaseModel

from dovetail.api.parser import CallForm, ParserCapabilities, ParserContext, ParserExample
from dovetail_server.parsers.calls import CallParser
from dovetail_server.parsers.pieces import Malformed, Marks, after_space

_TAG = "<|python_tag|>"
_SEPARATORS = ";,"


class Llama3JsonCalls(CallParser):
    """The mark is a special token, without which a call after text can't be distinguished from
    text. A call without it is recognized only at the beginning of the answer or after another call,
    so that JSON within an answer remains content."""

    capabilities = ParserCapabilities(
        calls=True,
        special_tokens=True,
        templates=((_TAG,), ("<|start_header_id|>", '"parameters"')),
    )
    examples = (
        ParserExample("Hi.", "Hi."),
        ParserExample("{", "{"),
        ParserExample('{"name":"J","age":3}', '{"name":"J","age":3}'),
        ParserExample(' <|python_tag|>{"name":"f","parameters":{}}', calls=(("f", "{}"),)),
        ParserExample(
            '{"name":"f","parameters":{"a": ";"}}; {"name":"g","parameters":{}}',
            calls=(("f", '{"a": ";"}'), ("g", "{}")),
        ),
        ParserExample('{"parameters":{},"name":"f"} x', "x", calls=(("f", "{}"),)),
        ParserExample("<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    )
    malformed = (
        Malformed(
            "another separator than `;`",
            "`,`, whitespace and nothing are accepted as well",
            ParserExample(
                '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}, {"name": "h", '
                '"parameters": {}}',
                calls=(("f", "{}"), ("g", "{}"), ("h", "{}")),
            ),
        ),
        Malformed(
            "text after a call",
            "it is content, with the separator before it",
            ParserExample(
                '{"name": "f", "parameters": {}}, and so on', ", and so on", calls=(("f", "{}"),)
            ),
        ),
        Malformed(
            "no parameters", "all of it is content", ParserExample('{"name": "f"}', '{"name": "f"}')
        ),
        Malformed(
            "parameters that aren't an object",
            "all of it is content",
            ParserExample('{"name": "f", "parameters": "x"}', '{"name": "f", "parameters": "x"}'),
        ),
        Malformed(
            "another key before the parameters",
            "all of it is content",
            ParserExample(
                '{"name": "f", "why": 1, "parameters": {}}',
                '{"name": "f", "why": 1, "parameters": {}}',
            ),
        ),
        Malformed(
            "another key after the parameters",
            "it is ignored",
            ParserExample('{"name": "f", "parameters": {}, "why": 1}', calls=(("f", "{}"),)),
        ),
    )
    marks = Marks(_TAG)

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._state = type(self).expect

    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return CallForm(_around, '{"name"', single=True)

    def begins_call(self, char: str) -> bool:
        """Accept a brace; the object's keys decide."""
        if char == "{":
            self.begin_call(bare=True)
        return char == "{"

    def after_call(self, *, complete: bool) -> None:
        """Expect another call, perhaps after a separator."""
        self._state = type(self).separator if complete else type(self).search

    def separator(self, text: str, pos: int) -> int:
        """State: after a call."""
        pos = after_space(text, pos)
        if pos == len(text):
            return pos
        self._state = type(self).expect
        if text[pos] not in _SEPARATORS:
            return pos
        self.lead = text[pos]
        return pos + 1


def _around(name: str) -> tuple[str, str]:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ', "}"
