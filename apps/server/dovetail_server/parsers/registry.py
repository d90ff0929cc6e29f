"""Parsers by name, and their detection from a model's chat template. `parser_for` creates the parser of one answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.checks import shown
from dovetail.errors import ConfigError
from dovetail_server.parsers.calls import ClosedCalls
from dovetail_server.parsers.glm45 import Glm45Calls
from dovetail_server.parsers.llama3_json import Llama3JsonCalls
from dovetail_server.parsers.mistral import MistralCalls
from dovetail_server.parsers.parameters import Tools
from dovetail_server.parsers.pieces import OutputParser
from dovetail_server.parsers.qwen3_coder import Qwen3CoderCalls
from dovetail_server.parsers.think import THINK, THINK_MARKS, ThinkReasoning


@dataclass(frozen=True, slots=True)
class Detected:
    """Names of the parsers that match a chat template; None where none does."""

    tool_parser: str | None
    reasoning_parser: str | None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls, and how to detect it."""

    make: Callable[[Tools], OutputParser]  # creates the parser of one answer
    marks: tuple[tuple[str, ...], ...]  # alternatives: a template of this format contains all texts of one of them

    def fits(self, chat_template: str) -> bool:
        """Return True if a template is of this format, unless an earlier entry of the table matches."""
        return any(all(mark in chat_template for mark in marks) for marks in self.marks)


_TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen3_coder": ToolFormat(Qwen3CoderCalls, (("<tool_call>", "<function="),)),
    "glm45": ToolFormat(Glm45Calls, (("<tool_call>", "<arg_key>"),)),
    "hermes": ToolFormat(lambda _: ClosedCalls(), (("<tool_call>",),)),
    "mistral": ToolFormat(lambda _: MistralCalls(), (("[TOOL_CALLS]",),)),
    "llama3_json": ToolFormat(lambda _: Llama3JsonCalls(), (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'))),
}
_REASONING = "think"


def detect(chat_template: str) -> Detected:
    """Return the parsers that match the marks in a chat template."""
    tool = next((name for name, known in _TOOL_FORMATS.items() if known.fits(chat_template)), None)
    return Detected(tool, _REASONING if any(mark in chat_template for mark in THINK_MARKS) else None)


def starts_in_reasoning(prompt: str, reasoning_parser: str | None) -> bool:
    """Return True if a rendered prompt ends with `<think>`, so that the answer begins with reasoning."""
    return reasoning_parser is not None and prompt.rstrip().endswith(THINK)


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise `ConfigError` for unknown parser names."""
    for setting, name, known in (("tool_parser", tool_parser, tuple(_TOOL_FORMATS)), ("reasoning_parser", reasoning_parser, (_REASONING,))):
        if name is not None and name not in known:
            raise ConfigError(f"{setting} is {shown(name)}, which is unknown; valid names are {', '.join(known)}")


def parser_for(*, tool_parser: str | None, reasoning_parser: str | None, tools: Tools | None, starts_in_reasoning: bool) -> OutputParser | None:
    """Return a parser for one answer, or None if all of its text is content.

    `tools`: those that the model may call, in OpenAI's chat format; without tools nothing is parsed as a call. `starts_in_reasoning`: the result of
    the function of that name.
    """
    calls = _TOOL_FORMATS[tool_parser].make(tools) if tool_parser is not None and tools else None
    return calls if reasoning_parser is None else ThinkReasoning(calls, starts_inside=starts_in_reasoning)
