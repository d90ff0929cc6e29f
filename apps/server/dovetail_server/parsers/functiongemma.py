"""Tool calls of FunctionGemma: as those of Gemma 4, with other marks."""

from __future__ import annotations

from dovetail.api.parser import ParserCapabilities, ParserExample
from dovetail_server.parsers.gemma4 import Gemma4Calls
from dovetail_server.parsers.pieces import Malformed


def _with_marks(example: ParserExample) -> ParserExample:
    return ParserExample(_marked(example.text), _marked(example.content), calls=example.calls)


def _marked(text: str) -> str:
    return (
        text.replace("<|tool_call>", "<start_function_call>")
        .replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>")
    )


class FunctiongemmaCalls(Gemma4Calls):
    """All marks are special tokens."""

    begin = "<start_function_call>"
    end = "<end_function_call>"
    string_mark = "<escape>"
    capabilities = ParserCapabilities(calls=True, special_tokens=True, templates=((begin,),))
    examples = tuple(map(_with_marks, Gemma4Calls.examples))
    malformed = tuple(
        Malformed(one.mistake, one.recovery, _with_marks(one.example))
        for one in Gemma4Calls.malformed
    )
