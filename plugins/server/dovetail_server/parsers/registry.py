"""The parsers by name, and which of them a model's chat template asks for. `parser_for` makes the parser of one answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dovetail.checks import shown
from dovetail.errors import ConfigError
from dovetail_server.parsers.events import OutputParser
from dovetail_server.parsers.hermes import HermesCalls
from dovetail_server.parsers.llama3_json import Llama3JsonCalls
from dovetail_server.parsers.mistral import MistralCalls
from dovetail_server.parsers.think import BEGIN as THINK
from dovetail_server.parsers.think import ThinkReasoning


@dataclass(frozen=True, slots=True)
class Detected:
    """Names of the parsers that fit a chat template; None where none does."""

    tool_parser: str | None
    reasoning_parser: str | None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls. `marks` tell it from a chat template: each alternative is a tuple of texts that a template has all of."""

    make: Callable[[], OutputParser]
    marks: tuple[tuple[str, ...], ...] = field(default=())


_TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(HermesCalls, (("<tool_call>",),)),
    "mistral": ToolFormat(MistralCalls, (("[TOOL_CALLS]",),)),
    "llama3_json": ToolFormat(Llama3JsonCalls, (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'))),
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
    tool = next((name for name, known in _TOOL_FORMATS.items() if any(all(mark in chat_template for mark in marks) for marks in known.marks)), None)
    return Detected(tool, _REASONING if THINK in chat_template or "</think>" in chat_template else None)


def starts_in_reasoning(prompt: str, reasoning_parser: str | None) -> bool:
    """Return True if a rendered prompt ends with an open `<think>`, so that the answer begins with reasoning."""
    return reasoning_parser is not None and prompt.rstrip().endswith(THINK)


def parser_for(*, tool_parser: str | None, reasoning_parser: str | None, has_tools: bool, starts_in_reasoning: bool) -> OutputParser | None:
    """Return a parser for one answer, or None if its text is all content.

    `has_tools` says that the request came with tools that the model may call; without them nothing is taken as a call. `starts_in_reasoning` is
    what the function of that name says of the prompt. Raises ConfigError for a name that isn't known.
    """
    _check("tool_parser", tool_parser, tool_parsers())
    _check("reasoning_parser", reasoning_parser, reasoning_parsers())
    calls = _TOOL_FORMATS[tool_parser].make() if tool_parser is not None and has_tools else None
    return calls if reasoning_parser is None else ThinkReasoning(calls, starts_inside=starts_in_reasoning)


def _check(setting: str, name: str | None, known: tuple[str, ...]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"{setting} is {shown(name)}, which isn't known; known are {', '.join(known)}")
