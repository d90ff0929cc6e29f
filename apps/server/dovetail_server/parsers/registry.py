"""`AnswerParsing` chooses the parsers of answers, for all chat APIs: those that the settings name,
or those that match a chat template. `call_rule` is the grammar that constrains a model to valid
tool calls, the counterpart of a parser."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import yaml

from dovetail.api.parser import CallForm, ParserContext
from dovetail.errors import ConfigError, DovetailError, RequestError, describe, shown
from dovetail.serving import AUTO, Registry, ResolvedComponent, Where
from dovetail_server.engine import ServedEngine
from dovetail_server.parsers import vllm_names
from dovetail_server.parsers.reader import AnswerParser, GuardedParser, ParserChoice
from dovetail_server.settings import PARSER_SETTINGS, Finds, ServerSettings

logger = logging.getLogger("dovetail.server")

Tool = tuple[str, Mapping[str, Any]]  # a function's name, the JSON Schema of its arguments

# Of built-in parsers, the first that matches is chosen: formats share marks.
_ORDER = (
    "harmony",
    "deepseek_v3",
    "kimi_k2",
    "minimax_m2",
    "gemma4",
    "functiongemma",
    "nemotron_h",
    "qwen3_coder",
    "glm45",
    "hermes",
    "mistral",
    "llama3_json",
    "gemma4_thought",
    "think",
)
_VLLM_NAMES: Mapping[Finds, Mapping[str, str | None]] = {
    "calls": vllm_names.CALLS,
    "reasoning": vllm_names.REASONING,
}


@dataclass(frozen=True, slots=True)
class ChosenParsers:
    """The parsers of a request, or None. One parser may find both."""

    calls: ParserChoice | None
    reasoning: ParserChoice | None

    @property
    def marks(self) -> tuple[str, str] | None:
        """The marks around reasoning."""
        return None if self.reasoning is None else self.reasoning.capabilities.reasoning


class KnownParsers:
    """The parsers of a registry, by name and by chat template."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        known = {
            component.spec.name: component
            for component in registry.components("parser")
            if component.origin.built_in
        }
        self.built_ins = [_chosen(known[name]) for name in _ORDER if name in known]
        self._others: list[ParserChoice] | None = None  # until a template matches no built-in

    def named(self, finds: Finds, choice: str) -> ParserChoice:
        """Return the parser that a setting names, as "name" or as "{name: …, option: …}" in YAML.
        Raises `ConfigError` or `PluginError`."""
        where = Where((PARSER_SETTINGS[finds],))
        options = {}
        name: Any = choice
        if choice.lstrip().startswith("{"):
            try:
                options = yaml.safe_load(choice)
                name = options.pop("name", None)
            except (yaml.YAMLError, AttributeError) as error:
                raise ConfigError(where.says(f"can't read {shown(choice)}: {error}")) from None
        if not isinstance(name, str):
            raise ConfigError(
                where.says(
                    f"expected a parser's name, or a mapping with `name` and its options, got "
                    f"{shown(choice)}"
                )
            )
        parser = _chosen(
            self._registry.resolve("parser", self._own_name(finds, name, where), options, where)
        )
        if not getattr(parser.capabilities, finds):
            able = [
                one.name
                for one in (*self.built_ins, *self._of_plugins())
                if getattr(one.capabilities, finds)
            ]
            what = "tool calls" if finds == "calls" else "reasoning"
            raise ConfigError(
                where.says(
                    f"parser {parser.name} doesn't find {what}; parsers that do: {', '.join(able)}"
                )
            )
        return parser

    def _own_name(self, finds: Finds, name: str, where: Where) -> str:
        """Return the name of the parser for one of vLLM's, any other name as it is. Raises
        `ConfigError` if no parser reads its format."""
        if any(
            name in (one.spec.name, one.qualified_name)
            for one in self._registry.components("parser")
            if not one.origin.built_in
        ):
            return name
        own = _VLLM_NAMES[finds].get(name, name)
        if own is None:
            told = (
                f"no built-in parser reads the format of vLLM's parser {name}: install a plugin "
                f"that does, or `null` returns such text as content"
            )
            raise ConfigError(where.says(told))
        return own

    def matching(self, finds: Finds, template: str) -> ParserChoice | None:
        """Return the parser that matches a chat template: the first built-in one, otherwise a
        plugin's. Raises `ConfigError` if parsers of several plugins match."""
        if (
            built_in := next(
                (one for one in self.built_ins if _matches(one, finds, template)), None
            )
        ) is not None or not template:
            return built_in
        others = [one for one in self._of_plugins() if _matches(one, finds, template)]
        if len(others) > 1:
            setting = PARSER_SETTINGS[finds]
            names = " and ".join(one.name for one in others)
            raise ConfigError(
                f"chat_template: it matches the parsers {names}: choose one with "
                f"--{setting.replace('_', '-')}, or null for none"
            )
        if others and not others[0].was_found:
            others[0].was_found = True
            logger.info("using parser %s: the chat template has its marks", others[0].name)
        return others[0] if others else None

    def _of_plugins(self) -> Sequence[ParserChoice]:
        """Return the parsers of installed plugins, imported now. One that can't be imported, or has
        required options, is skipped and logged."""
        if self._others is None:
            self._others = []
            for component in self._registry.components("parser"):
                if component.origin.built_in or component.api_problem() is not None:
                    continue
                try:
                    self._others.append(_chosen(component))
                except DovetailError as error:
                    logger.warning(
                        "parser %s isn't considered for `auto`: %s", component.qualified_name, error
                    )
        return self._others


def _chosen(component: ResolvedComponent) -> ParserChoice:
    name = component.spec.name if component.origin.built_in else component.qualified_name
    return ParserChoice(name, component.load(), component.validate_options())


def _matches(parser: ParserChoice, finds: Finds, template: str) -> bool:
    can = parser.capabilities
    return bool(getattr(can, finds)) and any(
        all(text in template for text in texts) for texts in can.templates
    )


def check_names(settings: ServerSettings, registry: Registry) -> None:
    """Raise `ConfigError` or `PluginError` if a setting names a parser that isn't in the
    registry."""
    known = KnownParsers(registry)
    for finds, name in settings.named_parsers.items():
        known.named(finds, name)


class AnswerParsing:
    """The parsers named by the settings, or detected from the chat template."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings, registry: Registry) -> None:
        """`registry`: that of the plugins that the engine's config admits. Raises `ConfigError` or
        `PluginError` for an unknown name, and `ConfigError` if the parsers of several plugins
        match."""
        self._known = KnownParsers(registry)
        self._named: dict[Finds, ParserChoice | None] = {}  # `auto` has no entry
        for finds, setting in PARSER_SETTINGS.items():
            if (name := getattr(settings, setting)) != AUTO:
                self._named[finds] = None if name is None else self._known.named(finds, name)
        self._text = ""
        with suppress(DovetailError):  # a model without a tokenizer is served with token ids
            self._text = engine.tokenizer.marks
        self._own = self._chosen(self._text)

    @property
    def expects_reasoning(self) -> bool:
        """True if the settings name a reasoning parser."""
        return self._named.get("reasoning") is not None

    def template(self, given: str | None = None) -> str:
        """Return the chat template's text: the request's if it has one, otherwise the model's."""
        return self._text if given is None or "{" not in given else given

    def parsers(self, template: str | None = None) -> ChosenParsers:
        """Return the parsers of a request, with its own chat template if it has one. Raises
        `RequestError` if those of several plugins match it."""
        text = self.template(template)
        try:
            return self._own if text is self._text else self._chosen(text)
        except ConfigError as error:
            raise RequestError(str(error)) from None

    def _chosen(self, template: str) -> ChosenParsers:
        return ChosenParsers(
            *(
                self._named[finds]
                if finds in self._named
                else self._known.matching(finds, template)
                for finds in PARSER_SETTINGS
            )
        )


def parser_for(
    parsers: ChosenParsers, prompt: str, tools: Sequence[Mapping[str, Any]] | None
) -> AnswerParser | None:
    """Return a parser for one answer; None if all of its text is content. `prompt`: the rendered
    one, which may have opened the reasoning. `tools`: those that the model may call; without tools
    nothing is parsed as a call."""
    tools = tuple(tools or ())
    calls = parsers.calls if tools else None
    if parsers.reasoning is None:
        return (
            None
            if calls is None
            else AnswerParser([GuardedParser(calls, ParserContext(tools))], reasons=False)
        )
    is_one = calls is not None and calls.component is parsers.reasoning.component
    context = ParserContext(tools if is_one else (), opens_reasoning(prompt, parsers.marks))
    stages = [GuardedParser(parsers.reasoning, context)]
    if calls is not None and not is_one:
        stages.append(GuardedParser(calls, ParserContext(tools)))
    return AnswerParser(stages, reasons=True)


def opens_reasoning(prompt: str, marks: tuple[str, str] | None) -> bool:
    """Return True if a rendered prompt ends with the mark that begins reasoning."""
    return marks is not None and prompt.rstrip().endswith(marks[0].rstrip())


def needs_special_tokens(parsers: ChosenParsers, tools: Any) -> bool:
    """Return True if the answer must be detokenized with special tokens."""
    used = (parsers.reasoning, parsers.calls if tools else None)
    return any(parser is not None and parser.capabilities.special_tokens for parser in used)


def call_rule(
    parser: ParserChoice,
    template: str,
    tools: Sequence[Tool],
    *,
    required: bool,
    single: bool,
    one_line: bool = False,
) -> Mapping[str, Any]:
    """Return a structural tag for calls in the parser's format. `template`: the chat template,
    which determines the variant of a format. `required`: the answer consists of calls only;
    `single`: it ends after the first call; `one_line`: it has no line breaks around arguments.

    Raises `ValueError` if the format can't be constrained that way.
    """
    try:
        form = parser.component.call_form(template)
        form = _on_one_line(form) if form is not None and one_line else form
        structures = [] if form is None else [_structure(form, *tool) for tool in tools]
    except Exception as error:  # the plugin's
        parser.report(error, "and its calls can't be constrained")
        raise ValueError(
            f"tool parser {parser.name} raised in call_form(): {describe(error)}"
        ) from error
    if form is None:
        raise ValueError(
            f"calls in the format of tool parser {parser.name} can't be constrained to a schema"
        )
    if not form.marked and not required:
        raise ValueError(
            f"calls in the format of tool parser {parser.name} have no mark, so they can be "
            f"constrained to a schema only if a call is demanded"
        )
    tag = {
        "structures": structures,
        "triggers": [form.trigger],
        "at_least_one": required,
        "stop_after_first": single or form.single,
    }
    return {**tag, "separator": form.separator} if required else tag


def _on_one_line(form: CallForm) -> CallForm:
    def around(name: str) -> tuple[str, str]:
        begin, end = form.around(name)
        return begin.replace("\n", ""), end.replace("\n", "")

    return replace(form, around=around, separator=form.separator.replace("\n", ""))


def _structure(form: CallForm, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    begin, end = form.around(name)
    return {"begin": begin, "schema": schema, "end": end}
