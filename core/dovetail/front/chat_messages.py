"""Messages of a conversation, in the form that OpenAI's API gave them: checked, and made into plain
values that a chat template can read.

For `chat`. Everything that can be wrong with a message is said here, by its place in the
conversation, before a template stumbles over it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.base.bounded_json import JsonTexts, WrongJsonError
from dovetail.errors import RequestError, shown

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# templates and engines name an assistant's thoughts differently
_REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)


def read_conversation(messages: Any, template: str) -> list[dict[str, Any]]:
    """The messages as plain dicts: contents are text, or lists of text parts; arguments of tool
    calls are mappings; no value is None; thoughts have every name that templates know. A role is
    one of `ROLES`, or one that the `template` names. Raises `RequestError` naming the wrong
    message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"a conversation must be a list of messages, one or more, got {shown(messages)}"
        )
    texts = JsonTexts()
    return [
        _read_message(message, f"messages[{index}]", template, texts)
        for index, message in enumerate(messages)
    ]


def without_other_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as `read_conversation` returns it, with thoughts under their first name alone."""
    return {key: value for key, value in message.items() if key not in _REASONING[1:]}


def _read_message(message: Any, place: str, template: str, texts: JsonTexts) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f'{place}: a message must be a mapping like {{"role": "user", "content": "…"}}, got '
            f"{shown(message)}"
        )
    read = {key: value for key, value in message.items() if value is not None}
    _check_role(read.get("role"), place, template)
    if "tool_calls" in read:
        read["tool_calls"] = _read_tool_calls(read["tool_calls"], place, texts)
    if "content" in read:
        read["content"] = _read_content(read["content"], f"{place}.content")
    elif read["role"] != "assistant" or "tool_calls" not in read:
        raise RequestError(
            f"{place}: it needs a content: only an assistant's message with tool_calls may have "
            f"none"
        )
    elif not read["tool_calls"]:
        read["content"] = ""
    if not read.get("tool_calls", True):
        del read["tool_calls"]  # templates may only look whether there is a list
    thoughts = next((read[name] for name in _REASONING if name in read), None)
    return read if thoughts is None else dict.fromkeys(_REASONING, thoughts) | read


def _check_role(role: Any, place: str, template: str) -> None:
    if not isinstance(role, str) or not role:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise RequestError(
            f"{place}.role must be one of {', '.join(ROLES)}, or one that the chat template names, "
            f"got {shown(role)}"
        )


def _read_content(content: Any, place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if (
        not isinstance(content, Sequence)
        or isinstance(content, bytes | bytearray | memoryview)
        or not content
    ):
        raise RequestError(f"{place} must be text, or a list of parts, got {shown(content)}")
    return [_read_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _read_part(part: Any, place: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise RequestError(
            f'{place} must be a mapping like {{"type": "text", "text": "…"}}, got {shown(part)}'
        )
    if part.get("type") != "text":
        raise RequestError(
            f"{place} is of type {shown(part.get('type'))}; only parts of type 'text' are "
            f"understood"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{place}.text must be a string, got {shown(part.get('text'))}")
    return {"type": "text", "text": part["text"]}


def _read_tool_calls(calls: Any, place: str, texts: JsonTexts) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(f"{place}.tool_calls must be a list, got {shown(calls)}")
    return [
        _read_tool_call(call, f"{place}.tool_calls[{index}]", texts)
        for index, call in enumerate(calls)
    ]


def _read_tool_call(call: Any, place: str, texts: JsonTexts) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f'{place} must be like {{"type": "function", "function": {{"name": "…", "arguments": '
            f"{{…}}}}}}, got {shown(call)}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as OpenAI's API has them
        arguments = _object_of(arguments or "{}", texts)
    if not isinstance(arguments, Mapping | None):
        raise RequestError(
            f"{place}.function.arguments must be a mapping, or the JSON text of one, got "
            f"{shown(function['arguments'])}"
        )
    return {**call, "function": {**function, "arguments": dict(arguments or {})}}


def _object_of(arguments: str, texts: JsonTexts) -> dict[str, Any]:
    """Arguments as the model wrote them, as a mapping. Those that aren't a JSON object (because the
    answer was cut off, say) become `{"INVALID_JSON": "…"}`, so that their conversation goes on."""
    with contextlib.suppress(WrongJsonError):
        value = texts.read(arguments)
        if isinstance(value, dict):
            return value
    return {"INVALID_JSON": arguments}


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools as plain dicts. Raises `RequestError` saying which one is wrong."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools must be a list of mappings, got {shown(tools)}")
    return [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _read_tool(tool: Any, place: str) -> dict[str, Any]:
    if callable(tool):
        raise RequestError(
            f"{place} is a Python function: give its description as a dict, which "
            f"transformers.utils.get_json_schema makes of it"
        )
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        like = (
            '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'
        )
        raise RequestError(
            f"{place} must be like {like}, with a JSON schema as its parameters, got {shown(tool)}"
        )
    return dict(tool)
