"""Reading of the tools of `/v1/messages`: functions. Other kinds, of `/v1/responses` too, are
refused with what would be right instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dovetail.errors import shown
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import converted, unsupported

T = TypeVar("T")

_WEB = (
    "the server searches no web: turn web search off in the client (Codex: web_search = "
    '"disabled" in config.toml), or run it as a function there'
)
_CODE = "the server runs no code: let the client run it, as a function"
_NO_SCHEMA = (
    "models here don't know this tool by heart: describe it as a function, with the "
    "schema of its arguments"
)
INSTEAD = {  # the beginning of a tool's type -> what would be right
    "web_search": _WEB,
    "web_fetch": _WEB,
    "code_execution": _CODE,
    "code_interpreter": _CODE,
    "image_generation": "models here write text",
    "file_search": "the server stores no files for models: search them in the client, as a "
    "function",
    "mcp": "the server connects to no MCP servers: let the client do it, and send their tools as "
    "functions",
    "tool_search": "the model sees all tools from the beginning: send them without it",
    "namespace": "a namespace has functions and custom tools only",
    **dict.fromkeys(
        (
            "bash",
            "text_editor",
            "computer",
            "memory",
            "browser",
            "shell",
            "local_shell",
            "apply_patch",
        ),
        _NO_SCHEMA,
    ),
}


def read_tools(tools: Sequence[Mapping[str, Any]], kind: type[T]) -> list[T]:
    """Return tools as structs of a kind, whose type is "custom" or missing. Raises `HttpError`
    naming the place of a tool of another type, or of the field that is wrong."""
    read = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if (given := tool.get("type")) not in ("custom", None):
            raise refuse_tool(given, place, "only tools of type 'custom' are supported")
        read.append(converted(tool, kind, place))
    return read


def refuse_tool(given: Any, place: str, otherwise: str) -> HttpError:
    """Return the error for a tool of a type that isn't supported. `otherwise`: what is said of a
    type that isn't known."""
    name = given if isinstance(given, str) else ""
    why = next((why for prefix, why in INSTEAD.items() if name.startswith(prefix)), otherwise)
    return unsupported(f"{place}.type", f"{why}, got {shown(given)}")
