"""Messages of a conversation, in the form that OpenAI's API gave them: checked, and made into plain
values that a chat template can read.

For `chat`. Everything that can be wrong with a message is said here, by its place in the
conversation, before a template stumbles over it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.base.bounded_json import JsonTexts, WrongJsonError
from dovetail.errors import RequestError, shown
from dovetail.front.media.sources import (
    IMAGE_PARTS,
    NO_IMAGES,
    ImageSource,
    check_kind,
    image_of_part,
)

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}

IMAGE = {"type": "image"}  # a part, as templates know it
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# templates and engines name an assistant's thoughts differently
_REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)


@dataclass
class ImageParts:
    """The images of a conversation, which are taken out of its messages as they are read."""

    local: bool  # messages are a program's, which may name local files and hold images of Pillow
    images: list[ImageSource] = field(default_factory=list)

    def take(self, part: Mapping[str, Any], place: str) -> bool:
        """Take the image of a part; return False if it is of another type. Raises
        `RequestError`."""
        image = image_of_part(part, place, local=self.local)
        if image is None:
            return False
        self.images.append(image)
        return True


def read_conversation(
    messages: Any, template: str, images: ImageParts | None = None
) -> list[dict[str, Any]]:
    """The messages as plain dicts: contents are text, or lists of text parts; arguments of tool
    calls are mappings; no value is None; thoughts have every name that templates know. A role is
    one of `ROLES`, or one that the `template` names. `images`: takes those of the messages, whose
    parts are `IMAGE` then; None: they may have none. Raises `RequestError` naming the wrong
    message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"a conversation must be a list of messages, one or more, got {shown(messages)}"
        )
    texts = JsonTexts()
    return [
        _read_message(message, f"messages[{index}]", template, texts, images)
        for index, message in enumerate(messages)
    ]


def without_other_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as `read_conversation` returns it, with thoughts under their first name alone."""
    return {key: value for key, value in message.items() if key not in _REASONING[1:]}


def without_images(messages: Any) -> Any:
    """Return messages without the parts that are images, by their type alone: what is counted
    before anything is read."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages
    return [
        {**message, "content": [part for part in message["content"] if not _is_image(part)]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def _is_image(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in IMAGE_PARTS


def _read_message(
    message: Any, place: str, template: str, texts: JsonTexts, images: ImageParts | None
) -> dict[str, Any]:
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
        read["content"] = _read_content(read["content"], f"{place}.content", images)
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


def _read_content(
    content: Any, place: str, images: ImageParts | None
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if (
        not isinstance(content, Sequence)
        or isinstance(content, bytes | bytearray | memoryview)
        or not content
    ):
        raise RequestError(f"{place} must be text, or a list of parts, got {shown(content)}")
    return [_read_part(part, f"{place}[{index}]", images) for index, part in enumerate(content)]


def _read_part(part: Any, place: str, images: ImageParts | None) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise RequestError(
            f'{place} must be a mapping like {{"type": "text", "text": "…"}}, got {shown(part)}'
        )
    if images is not None and images.take(part, place):
        return dict(IMAGE)
    if images is None and _is_image(part):
        raise RequestError(f"{place}: {NO_IMAGES}")
    check_kind(part.get("type"), place)
    if part.get("type") != "text":
        raise RequestError(
            f"{place} is of type {shown(part.get('type'))}; only parts of type 'text', and "
            f"'image_url' with models that read images, are understood"
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
