"""`AnswerParsing`: which parsers of tool calls and reasoning a server uses, made for each answer. For the routes of all chat APIs."""

from __future__ import annotations

from dovetail.errors import ConfigError, DovetailError
from dovetail.front.tokenizer import TokenizedText
from dovetail_server.engine import ServedEngine
from dovetail_server.parsers import Detected, OutputParser, Tools, detect, parser_for, reasoning_parsers, starts_in_reasoning, tool_parsers
from dovetail_server.settings import ServerSettings


class AnswerParsing:
    """The parsers that the settings name, or that the model's chat template asks for."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        """Raises `ConfigError` for a parser that isn't known."""
        self._settings = settings
        for option, name, known in (
            ("tool_parser", settings.tool_parser, tool_parsers()),
            ("reasoning_parser", settings.reasoning_parser, reasoning_parsers()),
        ):
            if name not in (None, "auto", *known):
                raise ConfigError(f"{option}: there is no parser {name!r}; valid are auto, {', '.join(known)}")
        self._text = "\n".join(_templates(engine))
        self._own = self._chosen(detect(self._text))

    @property
    def expects_reasoning(self) -> bool:
        """True if the settings name a parser of reasoning, rather than leave it to the chat template."""
        return self._settings.reasoning_parser not in (None, "auto")

    def template(self, given: str | None = None) -> str:
        """Return the text of the chat template that a request brought, or of the model's own."""
        return self._text if given is None or "{" not in given else given

    def names(self, template: str | None = None) -> Detected:
        """Return the parsers for a request that brought this chat template, if it brought one."""
        text = self.template(template)
        return self._own if text is self._text else self._chosen(detect(text))

    def parser(self, prompt: TokenizedText, *, tools: Tools | None, template: str | None = None) -> OutputParser | None:
        """Return a parser for one sample's text; None if all of it is content. `tools`: those that the model
        may call; `template`: the chat template that the request brought."""
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


def _templates(engine: ServedEngine) -> list[str]:
    try:
        return list(engine.tokenizer.chat_templates.values())
    except DovetailError:  # a model without a tokenizer is served with token ids
        return []
