"""The parsers by name, and which of them a model's chat template asks for. `parser_for` makes the parser of one answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.checks import shown
from dovetail.errors import ConfigError
from dovetail_server.parsers.events import OutputParser
from dovetail_server.parsers.glm45 import Glm45Calls
from dovetail_server.parsers.hermes import HermesCalls
from dovetail_server.parsers.llama3_json import Llama3JsonCalls
from dovetail_server.parsers.mistral import MistralCalls
from dovetail_server.parsers.parameters import Tools
from dovetail_server.parsers.qwen3_coder import Qwen3CoderCalls
from dovetail_server.parsers.think import THINK, THINK_MARKS, ThinkReasoning


@dataclass(frozen=True, slots=True)
class Detected:
    """Names of the parsers that fit a chat template; None where none does."""

    tool_parser: str | None
    reasoning_parser: str | None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls, and what tells it from a chat template."""

    make: Callable[[Tools], OutputParser]  # makes the parser of one answer
    marks: tuple[tuple[str, ...], ...]  # alternatives: a template of this format has all texts of one of them

    def fits(self, chat_template: str) -> bool:
        """Return True if a template is of this format, unless it is of one before it in the table."""
        return any(all(mark in chat_template for mark in marks) for marks in self.marks)


_TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen3_coder": ToolFormat(Qwen3CoderCalls, (("<tool_call>", "<function="),)),
    "glm45": ToolFormat(Glm45Calls, (("<tool_call>", "<arg_key>"),)),
    "hermes": ToolFormat(lambda _: HermesCalls(), (("<tool_call>",),)),
    "mistral": ToolFormat(lambda _: MistralCalls(), (("[TOOL_CALLS]",),)),
    "llama3_json": ToolFormat(lambda _: Llama3JsonCalls(), (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'))),
}
_REASONING = "think"


def tool_parsers() -> tuple[str, ...]:
    """Return the names of the formats of tool calls."""
    return tuple(_TOOL_FORMATS)


def reasoning_parsers() -> tuple[str, ...]:
    """Return the names of the formats of reasoning."""
    return (_REASONING,)


def detect(chat_template: str) -> Detected:
    """Return the parsers that a chat template asks for, by the marks that it writes itself."""
    tool = next((name for name, known in _TOOL_FORMATS.items() if known.fits(chat_template)), None)
    return Detected(tool, _REASONING if any(mark in chat_template for mark in THINK_MARKS) else None)


def starts_in_reasoning(prompt: str, reasoning_parser: str | None) -> bool:
    """Return True if a rendered prompt ends with an open `<think>`, so that the answer begins with reasoning."""
    return reasoning_parser is not None and prompt.rstrip().endswith(THINK)


def parser_for(*, tool_parser: str | None, reasoning_parser: str | None, tools: Tools | None, starts_in_reasoning: bool) -> OutputParser | None:
    """Return a parser for one answer, or None if its text is all content.

    `tools` are those that the model may call, as in OpenAI's chat; without them nothing is taken as a call. `starts_in_reasoning` is
    what the function of that name says of the prompt. Raises ConfigError for a name that isn't known.
    """
    _check("tool_parser", tool_parser, tool_parsers())
    _check("reasoning_parser", reasoning_parser, reasoning_parsers())
    calls = _TOOL_FORMATS[tool_parser].make(tools) if tool_parser is not None and tools else None
    return calls if reasoning_parser is None else ThinkReasoning(calls, starts_inside=starts_in_reasoning)


def _check(setting: str, name: str | None, known: tuple[str, ...]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"{setting} is {shown(name)}, which isn't known; known are {', '.join(known)}")
