"""Tool calls and reasoning out of a model's text, while it is streamed.

Routes ask `detect` once a model, `parser_for` once an answer, and feed the parser with the text of each output. The parsers know nothing of HTTP.
"""

from dovetail_server.parsers.events import Content, Event, OutputParser, Reasoning, ToolCallArguments, ToolCallStart
from dovetail_server.parsers.parameters import Tools
from dovetail_server.parsers.reader import AnswerReader, reasoning_tokens_of
from dovetail_server.parsers.registry import Detected, detect, parser_for, reasoning_parsers, starts_in_reasoning, tool_parsers

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
    "detect",
    "parser_for",
    "reasoning_parsers",
    "reasoning_tokens_of",
    "starts_in_reasoning",
    "tool_parsers",
]
