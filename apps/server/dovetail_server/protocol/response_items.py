"""Items of `/v1/responses`: what a conversation consists of in OpenAI's Responses API, and its
conversion to chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from dovetail.errors import RequestError, shown
from dovetail.serving import image_of_text
from dovetail_server.protocol.advisory import LEFT_OUT
from dovetail_server.protocol.decoding import converted
from dovetail_server.protocol.images import image_not_read, image_part, text_part
from dovetail_server.protocol.response_tools import Callee, ResponseTools

Status = Literal["in_progress", "completed", "incomplete"]


class _Content(Struct, forbid_unknown_fields=True, tag_field="type"):
    """Content of a message."""


class InputText(_Content, tag="input_text"):
    """Text of a user or developer."""

    text: str
    # no-op: the prefix cache always keeps prompts
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(_Content, tag="input_image"):
    """An image: a `data:` URL, or a URL of a host that `media.hosts` names. If the model reads
    none, one in a tool's result is replaced by `text`: without that, each later request of the
    conversation would be refused for what the tool returned."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None
    # no-op: the prefix cache always keeps prompts
    prompt_cache_breakpoint: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return LEFT_OUT.format("an image")

    def part(self, place: str) -> dict[str, Any]:
        """Return it as a part of OpenAI's chat format. Raises `RequestError`."""
        if self.image_url is None:
            raise RequestError(f"{place}.image_url: it is required; files aren't read")
        return image_part(image_of_text(self.image_url, place))


class ResultFile(_Content, tag="input_file"):
    """A file in a tool's result. The model reads that there is one."""

    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None

    @property
    def text(self) -> str:
        return LEFT_OUT.format("a file")


class OutputText(_Content, tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


_Part = InputText | OutputText | InputImage | ResultFile


class ReasoningText(_Content, tag="reasoning_text"):
    """Reasoning of an earlier answer."""

    text: str


class SummaryText(_Content, tag="summary_text"):
    text: str


class _Item(Struct, forbid_unknown_fields=True, kw_only=True):
    """An item of the input."""

    id: str | None = None
    status: Status | None = None


class MessageItem(_Item, kw_only=True):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | InputImage]
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(_Item, kw_only=True):
    """A function call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")


class FunctionCallOutputItem(_Item, kw_only=True):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText | InputImage | ResultFile]
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class CustomCallItem(_Item, kw_only=True):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")


class CustomCallOutputItem(_Item, kw_only=True):
    """The result of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: str | list[InputText | InputImage | ResultFile]
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class ShellAction(Struct, forbid_unknown_fields=True, kw_only=True):
    """A command of a local shell."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    working_directory: str | None = None
    user: str | None = None


class LocalShellCallItem(_Item, kw_only=True):
    """A call of the local shell in an earlier answer."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: ShellAction


class LocalShellOutputItem(_Item, kw_only=True):
    """The result of a local shell. `call_id` is another name of `id`."""

    type: Literal["local_shell_call_output"]
    call_id: str | None = None
    output: str


class ToolSearchCallItem(_Item, kw_only=True):
    """A search for tools in an earlier answer."""

    type: Literal["tool_search_call"]
    call_id: str | None = None
    execution: Literal["client"] = "client"
    arguments: dict[str, Any]


class ToolSearchOutputItem(_Item, kw_only=True):
    """The tools that a search has found: the model may call them."""

    type: Literal["tool_search_output"]
    call_id: str | None = None
    execution: Literal["client"] = "client"
    tools: list[dict[str, Any]]


class AdditionalToolsItem(_Item, kw_only=True):
    """Tools that the model may call, too."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: list[dict[str, Any]]


class ReasoningItem(_Item, kw_only=True):
    """Reasoning of an earlier answer; it belongs to the assistant's next message or call."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


Item = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | ReasoningItem
    | CustomCallItem
    | CustomCallOutputItem
    | LocalShellCallItem
    | LocalShellOutputItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
    | AdditionalToolsItem
)
ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomCallOutputItem,
    "local_shell_call": LocalShellCallItem,
    "local_shell_call_output": LocalShellOutputItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
    "additional_tools": AdditionalToolsItem,
}


def read_items(items: str | Sequence[dict[str, Any]]) -> list[Item]:
    """Return the input's items. Raises `RequestError` or `HttpError` naming the wrong one."""
    if isinstance(items, str):
        return [MessageItem(role="user", content=items)]
    if not items:
        raise RequestError("input must be text, or a list of one item or more, got an empty list")
    return [_read_item(item, f"input[{index}]") for index, item in enumerate(items)]


def _read_item(item: dict[str, Any], place: str) -> Item:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise RequestError(f"{place}.type must be one of {', '.join(ITEMS)}, got {shown(kind)}")
    return converted(item, ITEMS[kind], place)


def chat_messages(
    instructions: str | None, items: Sequence[Item], *, images: bool = False
) -> list[dict[str, Any]]:
    """Convert the items to OpenAI's chat format. Consecutive reasoning, text and calls of the
    assistant become one message. `images`: the model reads them. Raises `HttpError` and
    `RequestError` naming the wrong part."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            _add_message(messages, item, f"input[{index}].content", images=images)
        elif isinstance(item, FunctionCallOutputItem | CustomCallOutputItem):
            output = (
                _content(item.output, f"input[{index}].output") if images else _text(item.output)
            )
            _add_result(messages, item.call_id, output)
        else:
            _ADDERS[type(item)](messages, item)
    for message in messages:
        if message["role"] != "assistant":
            continue
        if "content" in message:
            message["content"] = "\n".join(message["content"])
        elif not message.get("tool_calls"):
            message["content"] = ""  # reasoning only
    return messages


def _add_message(
    messages: list[dict[str, Any]], item: MessageItem, place: str, *, images: bool
) -> None:
    if not images or item.role == "assistant":
        _refuse_images(item, place)
    if item.role == "assistant":
        _add_text(_assistant_message(messages), _text(item.content))
    else:
        messages.append({"role": item.role, "content": _content(item.content, place)})


def _refuse_images(item: MessageItem, place: str) -> None:
    for index, part in enumerate(item.content):
        if isinstance(part, InputImage):
            at = f"{place}[{index}]"
            if item.role == "assistant":
                raise RequestError(f"{at}: an assistant's message has no images")
            raise image_not_read(at, "input_image")


def _add_reasoning(messages: list[dict[str, Any]], item: ReasoningItem) -> None:
    thoughts = item.summary if item.content is None else item.content
    message = _assistant_message(messages, new=True)
    message["reasoning_content"] = "\n".join(part.text for part in thoughts)


def _add_function_call(messages: list[dict[str, Any]], item: FunctionCallItem) -> None:
    callee = Callee("function", item.name, item.namespace)
    _add_call(messages, item.call_id, callee, item.arguments)


def _add_custom_call(messages: list[dict[str, Any]], item: CustomCallItem) -> None:
    callee = Callee("custom", item.name, item.namespace)
    _add_call(messages, item.call_id, callee, {"input": item.input})


def _add_shell_call(messages: list[dict[str, Any]], item: LocalShellCallItem) -> None:
    action = msgspec.to_builtins(item.action)
    del action["type"]
    arguments = {name: value for name, value in action.items() if value is not None}
    callee = Callee("local_shell", "local_shell")
    _add_call(messages, item.call_id or item.id or "", callee, arguments)


def _add_search_call(messages: list[dict[str, Any]], item: ToolSearchCallItem) -> None:
    callee = Callee("tool_search", "tool_search")
    _add_call(messages, item.call_id or "", callee, item.arguments)


def _add_shell_output(messages: list[dict[str, Any]], item: LocalShellOutputItem) -> None:
    _add_result(messages, item.call_id or item.id or "", item.output)


def _add_search_output(messages: list[dict[str, Any]], item: ToolSearchOutputItem) -> None:
    found = ", ".join(function.name for function in ResponseTools(item.tools).functions)
    _add_result(messages, item.call_id or "", f"Found: {found}" if found else "Found none")


_ADDERS: Mapping[type, Callable[[list[dict[str, Any]], Any], None]] = {
    ReasoningItem: _add_reasoning,
    FunctionCallItem: _add_function_call,
    CustomCallItem: _add_custom_call,
    LocalShellCallItem: _add_shell_call,
    LocalShellOutputItem: _add_shell_output,
    ToolSearchCallItem: _add_search_call,
    ToolSearchOutputItem: _add_search_output,
}


def _add_call(messages: list[dict[str, Any]], call_id: str, callee: Callee, arguments: Any) -> None:
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": callee.function, "arguments": arguments},
    }
    _assistant_message(messages).setdefault("tool_calls", []).append(call)


def _add_result(messages: list[dict[str, Any]], call_id: str, content: Any) -> None:
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _assistant_message(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Return the last message if it is the assistant's and may continue, otherwise a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or new:
        messages.append({"role": "assistant"})
    return messages[-1]


def _add_text(message: dict[str, Any], text: str) -> None:
    """Add text to an assistant's message, whose content is a list until it has all of them:
    joining each would take quadratic time."""
    texts: list[str] = message.setdefault("content", [])
    if texts == [""]:
        texts.clear()
    texts.append(text)


def _content(content: str | Sequence[_Part], place: str) -> str | list[dict[str, Any]]:
    """Convert a content: a text, unless it has images. Raises `RequestError`."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _text(content)
    return [
        part.part(f"{place}[{index}]") if isinstance(part, InputImage) else text_part(part.text)
        for index, part in enumerate(content)
    ]


def _text(content: str | Sequence[_Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
