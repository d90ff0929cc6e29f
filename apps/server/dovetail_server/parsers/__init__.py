"""Streaming parsers of tool calls and reasoning in a model's text.

Routes call `detect` once per model and `parser_for` once per answer, and feed the parser with the text of each output. Parsers don't depend on HTTP.
"""

from dovetail_server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dovetail_server.parsers.parameters import Tools
from dovetail_server.parsers.pieces import OutputParser
from dovetail_server.parsers.reader import AnswerReader, reasoning_tokens_of
from dovetail_server.parsers.registry import Detected, check_parsers, detect, parser_for, starts_in_reasoning

__all__ = [
    "AnswerReader",
    "Content",
    "Detected",
    "Event",
    "OutputParser",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallStart",
    "Tools",
    "check_parsers",
    "detect",
    "parser_for",
    "reasoning_tokens_of",
    "starts_in_reasoning",
]
