"""Structured-output options of all HTTP APIs: formats, guided decoding, and demanded tool calls.
`routes.answering` turns them into parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from dovetail.errors import RequestError, shown
from dovetail.request.structured import Structured
from dovetail.serving import structured_of_vllm
from dovetail_server.errors import RULE, HttpError

T = TypeVar("T")

# --- formats --------------------------------------------------------------------------------------


class _Format(Struct, forbid_unknown_fields=True, tag_field="type"):
    """Base of the answer formats."""


class TextFormat(_Format, tag="text"):
    """Unconstrained text."""


class JsonObjectFormat(_Format, tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON Schema. Enforced whatever `strict` says."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Format, tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(_Format, tag="structural_tag"):
    """Free text with constrained segments: wherever a trigger appears, one of the structures must
    follow."""

    structures: list[dict[str, Any]]
    triggers: list[str]
    at_least_one: bool = False
    stop_after_first: bool = False
    separator: str | None = None


class FlatJsonSchemaFormat(_Format, tag="json_schema", kw_only=True):
    """JSON that follows a schema, in the form of `/v1/responses`. Enforced whatever `strict`
    says."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class MessageJsonSchemaFormat(_Format, tag="json_schema"):
    """JSON that follows a schema, in the form of `/v1/messages`."""

    schema: dict[str, Any]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
ResponsesFormat = TextFormat | JsonObjectFormat | FlatJsonSchemaFormat


class RuleFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's structured-output parameters, accepted by every API: `structured_outputs` and its
    older `guided_*` names."""

    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


_IN_VLLMS_WORDS = {  # parameter -> field of `StructuredOutputsParams`; None: all of them
    "structured_outputs": None,
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}


# --- tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that the model may call, the same for all APIs."""

    name: str
    schema: Any  # JSON Schema of its arguments; None or empty: it takes none
    strict: bool
    template: Mapping[str, Any]  # the tool in OpenAI's chat format, which chat templates read

    @classmethod
    def of(
        cls,
        name: str,
        description: str | None,
        schema: Any,
        strict: bool | None,
        default: Any = None,
    ) -> ToolFunction:
        """Build a tool from its fields. `default`: the schema shown to the template if `schema` is
        empty."""
        described = {} if description is None else {"description": description}
        function = {"name": name, **described, "parameters": schema or default or {}}
        return cls(name, schema, bool(strict), {"type": "function", "function": function})


class CallChoice(NamedTuple):
    """Which tool calls an answer must contain."""

    required: bool = False  # the answer is calls, with no text
    name: str | None = None  # the function to call; None: any
    parallel: bool | None = None  # more than one call is allowed; None: only if no call is required

    @property
    def single(self) -> bool:
        """The answer ends after its first call."""
        return self.name is not None or not (
            self.parallel or (self.parallel is None and not self.required)
        )


def read_tool_choice(choice: Any, parallel: bool | None) -> CallChoice:
    """Read OpenAI's `tool_choice` and `parallel_tool_calls`. Raises `HttpError`."""
    if choice in (None, "none", "auto"):
        return CallChoice(parallel=parallel)
    if choice == "required":
        return CallChoice(True, parallel=parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)  # nested in chat, flat in responses
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return CallChoice(True, function["name"], parallel)
    raise HttpError(
        400,
        f'tool_choice: "none", "auto", "required" and {{"type": "function", …}} with the name of a '
        f"tool are supported, got {shown(choice)}",
        param="tool_choice",
        code="unsupported_parameter",
    )


# --- demands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallDemand:
    """Constraint on tool calls: only these functions, with arguments that follow their schemas."""

    tools: Sequence[tuple[str, Mapping[str, Any]]]  # name, JSON Schema of the arguments
    required: bool  # the answer is calls, with no text
    single: bool  # the answer ends after the first call
    # if the model's format can't be constrained, dropping further calls is enough
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """Constraint on an answer: at most one of `rule` and `calls`."""

    param: str = "structured_outputs"  # the API parameter that demands it
    rule: Structured | None = None
    calls: CallDemand | None = None


class ParamNames(NamedTuple):
    """An API's names for the parameters that constrain answers. Error messages use them."""

    form: str = "response_format"
    parallel: str = "parallel_tool_calls"
    strict: str = "tools[{}].strict"  # of the tool at an index


_FREE = CallChoice()
_NAMES = ParamNames()


def read_demand(
    body: RuleFields,
    form: Any,
    tools: Sequence[ToolFunction] = (),
    choice: CallChoice = _FREE,
    names: ParamNames = _NAMES,
) -> Demand:
    """Return what a request demands of its answer. `form`: the value of the API's own format
    parameter. Raises `HttpError` for parameters that contradict each other, and `RequestError` that
    begins with the parameter's name."""
    calls = _call_demand(tools, choice, names)
    rules: dict[str, Structured] = {}
    if (rule := _named(names.form, partial(_rule_of_format, form))) is not None:
        rules[names.form] = rule
    for name, field in _IN_VLLMS_WORDS.items():
        if (value := getattr(body, name, None)) is not None:
            rules[name] = _named(name, partial(_rule_of_field, field, value))
    if other := next(
        (name for name, rule in rules.items() if rule != next(iter(rules.values()))), None
    ):  # clients repeat a rule under older names
        one = next(iter(rules))
        raise HttpError(
            400, f"{one} and {other} contradict each other: an answer follows one rule", param=one
        )
    if not rules or choice.required:  # an answer that is only calls has no text to constrain
        return calls or Demand()
    name, rule = next(iter(rules.items()))
    if tools:
        raise HttpError(
            400,
            f"{name} and tools: an answer that follows the rule can't call a tool; set "
            f'tool_choice to "none", or demand a call with it',
            param=name,
            code="unsupported_parameter",
        )
    return Demand(name, rule)


def _call_demand(
    tools: Sequence[ToolFunction], choice: CallChoice, names: ParamNames
) -> Demand | None:
    """Return the constraint on the answer's calls, or None if there is none."""
    if choice.required and not tools:
        raise HttpError(
            400, "tool_choice: a call is demanded, and there are no tools", param="tool_choice"
        )
    if choice.name is not None and choice.name not in (known := [tool.name for tool in tools]):
        raise HttpError(
            400,
            f"tool_choice: there is no tool {shown(choice.name)}; there are {', '.join(known)}"[
                :1000
            ],
            param="tool_choice",
        )
    single = choice.single
    strict = [names.strict.format(index) for index, tool in enumerate(tools) if tool.strict]
    has_demand = choice.required or single or strict
    if not tools or not has_demand:
        return None
    schemas = [
        (tool.name, _arguments(tool.schema)) for tool in tools if choice.name in (None, tool.name)
    ]
    param = "tool_choice" if choice.required else names.parallel if single else strict[0]
    return Demand(
        param,
        calls=CallDemand(schemas, choice.required, single, cut=not choice.required and not strict),
    )


def _arguments(schema: Any) -> Mapping[str, Any]:
    """Return the schema of a function's arguments; without one, the function takes none."""
    return (
        schema
        if isinstance(schema, Mapping) and schema
        else {"type": "object", "properties": {}, "additionalProperties": False}
    )


def _rule_of_format(form: Any) -> Structured | None:
    match form:
        case JsonObjectFormat():
            return Structured(json_object=True)
        case JsonSchemaFormat(json_schema=schema):
            return Structured(json_schema=schema.schema)
        case FlatJsonSchemaFormat() | MessageJsonSchemaFormat():
            return Structured(json_schema=form.schema)
        case StructuralTagFormat():
            tag = msgspec.to_builtins(form)
            return Structured(
                structural_tag={
                    key: value for key, value in tag.items() if key != "type" and value is not None
                }
            )
    return None


def _rule_of_field(field: str | None, value: Any) -> Structured:
    return structured_of_vllm(value if field is None else {field: value})


def _named(name: str, make: Callable[[], T]) -> T:
    """Return what `make` does, with its errors beginning with the parameter's name in the API."""
    try:
        return make()
    except RequestError as error:
        text = str(error)
        if RULE.match(text):
            text = RULE.sub(lambda _: name, text, count=1)
        raise RequestError(text if text.startswith(name) else f"{name}: {text}") from None
