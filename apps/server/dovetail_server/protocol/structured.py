"""The demands of requests of all APIs on an answer's form: a rule that its text follows, or calls of tools. `constraining` makes parameters of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from dovetail.checks import shown
from dovetail.errors import RequestError
from dovetail.sampling_params import StructuredOutputsParams
from dovetail.structured import Structured, structured_of_vllm
from dovetail_server.errors import RULE, HttpError

T = TypeVar("T")

# --- formats ------------------------------------------------------------------------------------------------------------------------------------


class _Format(Struct, forbid_unknown_fields=True, tag_field="type"):
    """The form of an answer."""


class TextFormat(_Format, tag="text"):
    """Text, as the model writes it."""


class JsonObjectFormat(_Format, tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON Schema. Answers follow it whatever `strict` says."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Format, tag="json_schema"):
    """JSON that a schema validates."""

    json_schema: JsonSchema


class StructuralTagFormat(_Format, tag="structural_tag"):
    """Text in which whatever begins with a trigger is one of the structures: JSON between two marks."""

    structures: list[dict[str, Any]]
    triggers: list[str]
    at_least_one: bool = False
    stop_after_first: bool = False
    separator: str | None = None


class FlatJsonSchemaFormat(_Format, tag="json_schema", kw_only=True):
    """JSON that a schema validates, as `/v1/responses` asks for it. Answers follow it whatever `strict` says."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class MessageJsonSchemaFormat(_Format, tag="json_schema"):
    """JSON that a schema validates, as `/v1/messages` asks for it."""

    schema: dict[str, Any]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
ResponsesFormat = TextFormat | JsonObjectFormat | FlatJsonSchemaFormat


class RuleFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Rules as vLLM's server takes them, for every API: what `SamplingParams.structured_outputs` is, and its older names."""

    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


# --- demands ------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A function that may be called, and the JSON Schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallDemand:
    """The demand on an answer's tool calls: that they are of these functions, with arguments that follow the schemas."""

    tools: tuple[ToolSchema, ...]
    required: bool  # the answer is calls, with no text
    single: bool  # nothing follows the first call
    param: str  # of the API, that says so


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand on an answer's form. At most one of the two."""

    rule: Structured | None = None
    calls: CallDemand | None = None
    param: str = "structured_outputs"  # of the API, that gives the rule


def demand_of(body: RuleFields, form: tuple[str, Any] | None, calls: CallDemand | None, has_tools: bool) -> Demand:
    """Return what a request demands. `form`: the name of the API's own parameter for it, and what that says; `has_tools`: the model may call tools.
    Raises `RequestError` that begins with the parameter's name, `HttpError` for parameters that contradict each other."""
    rules: dict[str, Structured] = {}
    if form is not None and (rule := _rule_of_format(*form)) is not None:
        rules[form[0]] = rule
    for name in RuleFields.__struct_fields__:
        if (value := getattr(body, name)) is not None:
            rules[name] = _named(name, partial(_rule_of_field, name, value))
    if len(rules) > 1:
        one, other = list(rules)[:2]
        raise HttpError(400, f"{one} and {other} contradict each other: an answer follows one rule", param=one)
    if calls is not None and calls.required:
        return Demand(calls=calls)  # the answer is calls: there is no text to follow a rule
    if not rules:
        return Demand(calls=calls)
    [(name, rule)] = rules.items()
    if has_tools:
        raise HttpError(
            400,
            f'{name} and tools: an answer that follows the rule can\'t call a tool; set tool_choice to "none", or to what demands a call',
            param=name,
            code="unsupported_parameter",
        )
    return Demand(rule=rule, param=name)


def _rule_of_format(name: str, form: Any) -> Structured | None:
    def made() -> Structured | None:
        match form:
            case JsonObjectFormat():
                return Structured(json_object=True)
            case JsonSchemaFormat(json_schema=schema):
                return Structured(json_schema=schema.schema)
            case FlatJsonSchemaFormat() | MessageJsonSchemaFormat():
                return Structured(json_schema=form.schema)
            case StructuralTagFormat():
                tag = msgspec.to_builtins(form)
                return Structured(structural_tag={key: value for key, value in tag.items() if key != "type" and value is not None})
        return None

    return _named(name, made)


def _rule_of_field(name: str, value: Any) -> Structured:
    if name == "structured_outputs":
        return structured_of_vllm(value)
    return StructuredOutputsParams(**{name.removeprefix("guided_"): value}).structured()


def _named(name: str, make: Callable[[], T]) -> T:
    """Have the error of a rule begin with the name that the client used."""
    try:
        return make()
    except RequestError as error:
        text = str(error)
        if RULE.match(text):
            text = RULE.sub(lambda _: name, text, count=1)
        raise RequestError(text if text.startswith(name) else f"{name}: {text}") from None


# --- tools --------------------------------------------------------------------------------------------------------------------------------------


def calls_of(
    tools: Sequence[tuple[str, Any, bool]], choice: tuple[str, bool, str | None], *, parallel: tuple[str, bool], strict: str
) -> CallDemand | None:
    """Return what is demanded of an answer's calls; None if the model is free.

    `tools`: name, JSON Schema of the arguments (or None) and `strict` of each. `choice`: the parameter's name, whether a call is demanded, and of
    which function (None: any). `parallel`: the parameter's name, and whether several calls are welcome. `strict`: the name of that parameter of a
    tool, with `{}` for its place. Raises `HttpError`.
    """
    param, required, name = choice
    if required and not tools:
        raise HttpError(400, f"{param}: a call is demanded, and there are no tools", param=param)
    if name is not None and name not in (known := [tool[0] for tool in tools]):
        raise HttpError(400, f"{param}: there is no tool {shown(name)}; there are {', '.join(known)}"[:1000], param=param)
    single = not parallel[1] or name is not None
    strict_ones = [strict.format(index) for index, tool in enumerate(tools) if tool[2]]
    if not tools or not (required or single or strict_ones):
        return None
    callable_ones = tuple(ToolSchema(tool[0], _arguments(tool[1])) for tool in tools if name in (None, tool[0]))
    return CallDemand(callable_ones, required, single, param if required else parallel[0] if single else strict_ones[0])


def _arguments(schema: Any) -> Mapping[str, Any]:
    """A function without parameters takes nothing."""
    return schema if isinstance(schema, Mapping) and schema else {"type": "object", "properties": {}, "additionalProperties": False}


def chosen_function(param: str, choice: Any) -> tuple[bool, str | None]:
    """Return whether OpenAI's `tool_choice` demands a call, and of which function. Raises `HttpError`."""
    if choice in (None, "none", "auto"):
        return False, None
    if choice == "required":
        return True, None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)  # of chat; of responses
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return True, function["name"]
    raise HttpError(
        400,
        f'{param}: "none", "auto", "required" and {{"type": "function", …}} with the name of a tool are supported, got {shown(choice)}',
        param=param,
        code="unsupported_parameter",
    )
