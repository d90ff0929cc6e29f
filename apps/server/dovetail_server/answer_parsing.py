"""`AnswerParsing`: choice of the parsers of tool calls and reasoning, for all chat APIs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from dovetail.errors import DovetailError
from dovetail.front.tokenizer import TokenizedText
from dovetail_server.engine import ServedEngine
from dovetail_server.parsers import Detected, OutputParser, Tools, check_parsers, detect, parser_for, starts_in_reasoning
from dovetail_server.settings import ServerSettings


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
