"""Parsers by name, and their detection from a model's chat template. `parser_for` creates the parser of one answer; `AnswerParsing` chooses it, for
all chat APIs. `call_rule` is the grammar that constrains a model to valid tool calls, the counterpart of a parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dovetail.checks import shown
from dovetail.errors import ConfigError, DovetailError
from dovetail.front.tokenizer import TokenizedText
from dovetail_server.engine import ServedEngine
from dovetail_server.parsers.calls import ClosedCalls
from dovetail_server.parsers.glm45 import Glm45Calls
from dovetail_server.parsers.llama3_json import Llama3JsonCalls
from dovetail_server.parsers.mistral import MistralCalls
from dovetail_server.parsers.pieces import OutputParser
from dovetail_server.parsers.qwen3_coder import Qwen3CoderCalls
from dovetail_server.parsers.tagged import Tools
from dovetail_server.parsers.think import THINK, THINK_MARKS, ThinkReasoning
from dovetail_server.settings import ServerSettings

Tool = tuple[str, Mapping[str, Any]]  # a function's name, the JSON Schema of its arguments


class _Form(NamedTuple):
    """How a format writes calls."""

    markup: Callable[[str], tuple[str, str]]  # around a call's arguments, by the function's JSON-encoded name
    trigger: str  # begins a call
    separator: str = ""  # between calls
    marked: bool = True  # text can't be mistaken for a call
    single: bool = False  # one call per answer; several would have another form


_HERMES = _Form(lambda name: (f'<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>"), "<tool_call>", separator="\n")
_LLAMA = _Form(lambda name: (f'{{"name": {name}, "parameters": ', "}"), '{"name"', marked=False, single=True)
_MISTRAL_ARRAY = _Form(lambda name: (f'[TOOL_CALLS][{{"name": {name}, "arguments": ', "}]"), "[TOOL_CALLS]", single=True)
_MISTRAL = _Form(lambda name: (f"[TOOL_CALLS]{json.loads(name)}[ARGS]", ""), "[TOOL_CALLS]")


_REASONING = "think"


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
    form_of: Callable[[str], _Form | None] = lambda template: None  # by the chat template; None: calls can't be constrained

    def fits(self, chat_template: str) -> bool:
        """Return True if a template is of this format, unless an earlier entry of the table matches."""
        return any(all(mark in chat_template for mark in marks) for marks in self.marks)


_TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen3_coder": ToolFormat(Qwen3CoderCalls, (("<tool_call>", "<function="),)),
    "glm45": ToolFormat(Glm45Calls, (("<tool_call>", "<arg_key>"),)),
    "hermes": ToolFormat(lambda _: ClosedCalls(), (("<tool_call>",),), lambda _: _HERMES),
    "mistral": ToolFormat(lambda _: MistralCalls(), (("[TOOL_CALLS]",),), lambda template: _MISTRAL if "[ARGS]" in template else _MISTRAL_ARRAY),
    "llama3_json": ToolFormat(lambda _: Llama3JsonCalls(), (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')), lambda _: _LLAMA),
}


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


class AnswerParsing:
    """The parsers named by the settings, or detected from the chat template."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        """Raise `ConfigError` for an unknown parser."""
        self._settings = settings
        named = (None if name == "auto" else name for name in (settings.tool_parser, settings.reasoning_parser))
        check_parsers(*named)
        templates: Mapping[str, str] = {}
        with suppress(DovetailError):  # a model without a tokenizer is served with token ids
            templates = engine.tokenizer.chat_templates
        self._text = "\n".join(templates.values())
        self._own = self._chosen(detect(self._text))

    @property
    def expects_reasoning(self) -> bool:
        """True if the settings name a reasoning parser."""
        return self._settings.reasoning_parser not in (None, "auto")

    def template(self, given: str | None = None) -> str:
        """Return the chat template's text: the request's if it has one, otherwise the model's."""
        return self._text if given is None or "{" not in given else given

    def names(self, template: str | None = None) -> Detected:
        """Return the names of the parsers for a request, with its own chat template if it has one."""
        text = self.template(template)
        return self._own if text is self._text else self._chosen(detect(text))

    def parser(self, prompt: TokenizedText, *, tools: Tools | None, template: str | None = None) -> OutputParser | None:
        """Return a parser for one sample's text; None if all of it is content. `tools`: those that the model may call; `template`: the request's
        own chat template."""
        names = self.names(template)
        return parser_for(
            tool_parser=names.tool_parser,
            reasoning_parser=names.reasoning_parser,
            tools=tools,
            starts_in_reasoning=starts_in_reasoning(prompt.text, names.reasoning_parser),
        )

    def _chosen(self, found: Detected) -> Detected:
        tool, reasoning = self._settings.tool_parser, self._settings.reasoning_parser
        return Detected(found.tool_parser if tool == "auto" else tool, found.reasoning_parser if reasoning == "auto" else reasoning)


def call_rule(tool_parser: str, template: str, tools: Sequence[Tool], *, required: bool, single: bool) -> Mapping[str, Any]:
    """Return a structural tag for calls in the parser's format. `template`: the chat template, which determines the variant of a format.
    `required`: the answer consists of calls only; `single`: it ends after the first call.

    Raises `ValueError` if the format can't be constrained that way.
    """
    known = _TOOL_FORMATS.get(tool_parser)
    form = None if known is None else known.form_of(template)
    if form is None:
        raise ValueError(f"calls in the format of tool parser {tool_parser} can't be constrained to a schema")
    if not form.marked and not required:
        raise ValueError(
            f"calls in the format of tool parser {tool_parser} have no mark, so they can be constrained to a schema only if a call is demanded"
        )
    structures = [
        {"begin": begin, "schema": schema, "end": end}
        for name, schema in tools
        for begin, end in (form.markup(json.dumps(name, ensure_ascii=False)),)
    ]
    tag = {"structures": structures, "triggers": [form.trigger], "at_least_one": required, "stop_after_first": single or form.single}
    return {**tag, "separator": form.separator} if required else tag
