"""Reasoning of Gemma 4: `<|channel>thought`, a line break, the reasoning, `<channel|>`."""

from __future__ import annotations

from dovetail.api.parser import ParserCapabilities, ParserExample
from dovetail_server.parsers.think import ThinkReasoning


class Gemma4Reasoning(ThinkReasoning):
    """Both marks are special tokens."""

    begin = "<|channel>thought"
    end = "<channel|>"
    capabilities = ParserCapabilities(
        reasoning=(begin, end), special_tokens=True, templates=((begin,),)
    )
    examples = (
        ParserExample("Hi.", "Hi."),
        ParserExample("<|channel>thought\na\n<channel|>b", "b", "a"),
        ParserExample(
            "<|channel>thought<channel <channel|> <|channel>thought",
            "<|channel>thought",
            "<channel",
        ),
        ParserExample("<|channel>thought\n<channel|>b", "b"),
        ParserExample("<|channel>thought a<|tool_call>", reasoning="a<|tool_call>"),
    )
