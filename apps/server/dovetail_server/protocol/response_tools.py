"""Tools of `/v1/responses`. The model sees functions only: the tools of a namespace one by one, and
the kinds of tools that Codex brings as functions that take their input. `ResponseTools` says how a
call of each is returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from dovetail.errors import shown
from dovetail_server.errors import HttpError
from dovetail_server.parsers.json_call import MAX_NAME
from dovetail_server.protocol.decoding import converted
from dovetail_server.protocol.structured import ToolFunction
from dovetail_server.protocol.tools import refuse_tool


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")


class CustomTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool whose input is any text. The model sees a grammar of it, which isn't enforced."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")


class NamespaceTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """Functions and custom tools with a common name before theirs."""

    type: Literal["namespace"]
    name: Annotated[str, Meta(max_length=MAX_NAME)]  # it is repeated for each tool
    description: str | None = None
    tools: list[dict[str, Any]]


class LocalShellTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A shell that the client runs."""

    type: Literal["local_shell"]


class ToolSearchTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A search of the client for further tools, which its results bring."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None


Tool = FunctionTool | CustomTool | NamespaceTool | LocalShellTool | ToolSearchTool
KINDS: Mapping[str, type[Tool]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
    "local_shell": LocalShellTool,
    "tool_search": ToolSearchTool,
}
_WITHIN = ("function", "custom")  # kinds of tools in a namespace
_NO_ARGUMENTS = {"type": "object", "properties": {}}
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_SHELL = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "description": "The program and its arguments",
        },
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class Callee(NamedTuple):
    """The tool that a call is for."""

    kind: Literal["function", "custom", "local_shell", "tool_search"]
    name: str
    namespace: str | None = None

    @property
    def function(self) -> str:
        """The function's name that the model sees."""
        if self.namespace is None:
            return self.name
        return self.namespace + ("" if self.namespace.endswith("__") else "__") + self.name


class ResponseTools:
    """The tools of a request."""

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        found: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> None:
        """`found`: further ones, each with its place in the request. Raises `HttpError` naming the
        place of a tool that is wrong or of another kind."""
        self._functions: dict[str, ToolFunction] = {}
        self._callees: dict[str, Callee] = {}
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")
        for place, tool in found:
            self._add(tool, place)

    @property
    def functions(self) -> list[ToolFunction]:
        """The functions that the model sees."""
        return list(self._functions.values())

    def callee(self, function: str) -> Callee:
        """Return the tool that a called function stands for."""
        return self._callees.get(function) or Callee("function", function)

    def _add(self, tool: Mapping[str, Any], place: str) -> None:
        for callee, function in _functions_of(_read(tool, place, KINDS), place):
            if self._callees.setdefault(function.name, callee) != callee:
                raise HttpError(
                    400,
                    f"{place}: the model would know two tools as {shown(function.name)}",
                    param=place,
                )
            self._functions[function.name] = function


def _read(tool: Mapping[str, Any], place: str, kinds: Mapping[str, type[Tool]]) -> Tool:
    kind = tool.get("type")
    searched_here = kind == "tool_search" and tool.get("execution") != "client"
    if not isinstance(kind, str) or kind not in kinds or searched_here:
        raise refuse_tool(kind, place, f"tools are of type {', '.join(kinds)}")
    return converted(tool, kinds[kind], place)


def _functions_of(
    tool: Tool, place: str, within: str | None = None, about: str | None = None
) -> Iterator[tuple[Callee, ToolFunction]]:
    """Yield the functions that the model sees of a tool. `within`: its namespace's name; `about`:
    that namespace's description, for the first of its tools only, since it may be long and they may
    be many."""
    match tool:
        case NamespaceTool():
            kinds = {kind: KINDS[kind] for kind in _WITHIN}
            for index, inner in enumerate(tool.tools):
                inner_place = f"{place}.tools[{index}]"
                yield from _functions_of(
                    _read(inner, inner_place, kinds),
                    inner_place,
                    tool.name,
                    tool.description if index == 0 else None,
                )
            return
        case FunctionTool():
            callee = Callee("function", tool.name, within)
            schema = tool.parameters
            description = tool.description
            strict = tool.strict
        case CustomTool():
            callee = Callee("custom", tool.name, within)
            schema = _INPUT
            description = _joined(tool.description, _told(tool.format, f"{place}.format"))
            strict = False
        case LocalShellTool():
            callee = Callee("local_shell", "local_shell")
            schema = _SHELL
            description = "Run a command."
            strict = False
        case ToolSearchTool():
            callee = Callee("tool_search", "tool_search")
            schema = tool.parameters or _QUERY
            description = tool.description
            strict = False
    yield (
        callee,
        ToolFunction.of(
            callee.function, _joined(about, description), schema, strict, _NO_ARGUMENTS
        ),
    )


def _joined(*texts: str | None) -> str | None:
    return "\n\n".join(text for text in texts if text) or None


def _told(form: Mapping[str, Any] | None, place: str) -> str | None:
    """Return the description of a custom tool's format for the model."""
    if form is None or form == {"type": "text"}:
        return None
    match form:
        case {
            "type": "grammar",
            "syntax": "lark" | "regex" as syntax,
            "definition": str(definition),
            **others,
        } if not others:
            return f"The input must follow this grammar ({syntax}):\n{definition}"
    raise HttpError(
        400,
        f"{place}: it must be text, or a grammar with syntax and definition, got {shown(form)}",
        param=place,
    )
