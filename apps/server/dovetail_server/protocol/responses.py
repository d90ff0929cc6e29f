"""Bodies of `/v1/responses` (OpenAI's Responses API), and their conversion to a `Conversation`. The
server stores nothing between requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from dovetail.errors import RequestError, shown
from dovetail.serving import ChatOptions
from dovetail_server.errors import HttpError
from dovetail_server.protocol import advisory
from dovetail_server.protocol.advisory import LEFT_OUT, Advisory
from dovetail_server.protocol.decoding import Only, converted, refuse_unsupported
from dovetail_server.protocol.openai_common import (
    Conversation,
    GenerationFields,
    ServiceTier,
    check_stream_options,
    sampling_params,
)
from dovetail_server.protocol.reasoning import Effort, asked_effort
from dovetail_server.protocol.response_tools import KINDS, Callee, ResponseTools
from dovetail_server.protocol.structured import (
    ParamNames,
    ResponsesFormat,
    TextFormat,
    read_demand,
    read_tool_choice,
)

# --- requests -------------------------------------------------------------------------------------

Status = Literal["in_progress", "completed", "incomplete"]


class _Content(Struct, forbid_unknown_fields=True, tag_field="type"):
    """Content of a message."""


class InputText(_Content, tag="input_text"):
    """Text of a user or developer."""

    text: str
    # no-op: the prefix cache always keeps prompts
    prompt_cache_breakpoint: dict[str, Any] | None = None


class ResultImage(_Content, tag="input_image"):
    """An image in a tool's result. The model reads that there is one: without that, each later
    request of the conversation would be refused for what the tool returned."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None

    @property
    def text(self) -> str:
        return LEFT_OUT.format("an image")


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
    content: str | list[InputText | OutputText]
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
    output: str | list[InputText | ResultImage | ResultFile]
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
    output: str | list[InputText | ResultImage | ResultFile]
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


class TextConfig(Struct, forbid_unknown_fields=True):
    """The form of the text."""

    format: ResponsesFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """How much the model may reason. Reasoning is returned in full, without a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Padding is never added."""

    include_obfuscation: bool | None = None


_TOOL_SCHEMA = Meta(
    extra_json_schema={
        "anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in KINDS.values()]
    }
)
_ITEM_SCHEMA = Meta(
    extra_json_schema={
        "anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in ITEMS.values()]
    }
)


class ResponsesRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """A conversation to continue."""

    ADVISORY: ClassVar[Sequence[Advisory]] = advisory.RESPONSES

    input: str | list[Annotated[dict[str, Any], _ITEM_SCHEMA]]
    instructions: str | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    tools: list[Annotated[dict[str, Any], _TOOL_SCHEMA]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # reasoning is never encrypted
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: int | None = None

    # Without effect: see `advisory`
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None

    # Only some values are supported
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    max_tool_calls: Any = None
    truncation: Any = None
    context_management: Any = None
    moderation: Any = None

    def renamed(self) -> Mapping[str, str]:
        names = {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
        return names | dict.fromkeys(("messages", "prompt", "conversation", "a"), "input")

    def check_supported(self) -> None:
        """Raise `HttpError` 400 naming an option that this server doesn't honour."""
        refuse_unsupported(self, ONLY)
        if self.top_logprobs and self.told_logprobs is None:
            raise HttpError(
                400, f'top_logprobs: it needs include: ["{_LOGPROBS}"]', param="top_logprobs"
            )
        check_stream_options(self)

    def to_conversation(self) -> Conversation:
        """Return the request in canonical form. Raises `HttpError` for unsupported parameters,
        `RequestError` for invalid ones."""
        self.check_supported()
        items = read_items(self.input)
        known = self.known_tools(items).functions
        tools = [] if self.tool_choice == "none" else known
        options = ChatOptions(
            tools=[tool.template for tool in tools] or None,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        params = sampling_params(
            self, max_tokens=self.max_output_tokens, logprobs=self.told_logprobs
        )
        choice = read_tool_choice(_function_choice(self.tool_choice), self.parallel_tool_calls)
        demand = read_demand(
            self,
            None if self.text is None else self.text.format,
            tools,
            choice,
            ParamNames("text.format"),
        )
        reasoning = asked_effort(
            "reasoning.effort", None if self.reasoning is None else self.reasoning.effort
        )
        return Conversation(
            chat_messages(self.instructions, items), options, params, demand, reasoning
        )

    def known_tools(self, items: Sequence[Item] | None = None) -> ResponseTools:
        """Return the tools that the model may call. `items`: the input's, if they have been read.
        Raises `HttpError` and `RequestError`."""
        found = []
        for index, item in enumerate(read_items(self.input) if items is None else items):
            if isinstance(item, ToolSearchOutputItem | AdditionalToolsItem):
                found += [
                    (f"input[{index}].tools[{place}]", tool)
                    for place, tool in enumerate(item.tools)
                ]
        return ResponseTools(self.tools or (), found)

    @property
    def told_logprobs(self) -> int | None:
        """How many alternatives to return with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None


_LOGPROBS = "message.output_text.logprobs"
_NOTHING_STORED = "nothing is stored between requests: send the whole conversation in input"
ONLY = (
    Only("previous_response_id", (), _NOTHING_STORED),
    Only("conversation", (), _NOTHING_STORED),
    Only("prompt", (), "no prompts are stored: send its text in input"),
    Only("background", (False,), "answers aren't stored: leave it out, or set it to false"),
    Only("max_tool_calls", (), "the server calls no tools itself"),
    Only("truncation", ("disabled",), "a conversation that doesn't fit the model is rejected"),
    Only("context_management", (), "the conversation is used as sent: compact it in the client"),
    Only("moderation", (), "the server has no moderation"),
)


def _function_choice(choice: Any) -> Any:
    """Return a `tool_choice` with the name of a custom tool as that of a function."""
    if isinstance(choice, Mapping) and choice.get("type") == "custom":
        return {**choice, "type": "function"}
    return choice


# --- conversations --------------------------------------------------------------------------------


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


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Convert the items to OpenAI's chat format. Consecutive reasoning, text and calls of the
    assistant become one message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        _ADDERS[type(item)](messages, item)
    for message in messages:
        if message["role"] != "assistant":
            continue
        if "content" in message:
            message["content"] = "\n".join(message["content"])
        elif not message.get("tool_calls"):
            message["content"] = ""  # reasoning only
    return messages


def _add_message(messages: list[dict[str, Any]], item: MessageItem) -> None:
    if item.role == "assistant":
        _add_text(_assistant_message(messages), _text(item.content))
    else:
        messages.append({"role": item.role, "content": _text(item.content)})


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


def _add_output(
    messages: list[dict[str, Any]], item: FunctionCallOutputItem | CustomCallOutputItem
) -> None:
    _add_result(messages, item.call_id, _text(item.output))


def _add_shell_output(messages: list[dict[str, Any]], item: LocalShellOutputItem) -> None:
    _add_result(messages, item.call_id or item.id or "", item.output)


def _add_search_output(messages: list[dict[str, Any]], item: ToolSearchOutputItem) -> None:
    found = ", ".join(function.name for function in ResponseTools(item.tools).functions)
    _add_result(messages, item.call_id or "", f"Found: {found}" if found else "Found none")


_ADDERS: Mapping[type, Callable[[list[dict[str, Any]], Any], None]] = {
    MessageItem: _add_message,
    ReasoningItem: _add_reasoning,
    FunctionCallItem: _add_function_call,
    FunctionCallOutputItem: _add_output,
    CustomCallItem: _add_custom_call,
    CustomCallOutputItem: _add_output,
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


def _add_result(messages: list[dict[str, Any]], call_id: str, text: str) -> None:
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


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


def _text(content: str | Sequence[InputText | OutputText | ResultImage | ResultFile]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


# --- answers --------------------------------------------------------------------------------------


class OutputTextPart(Struct, tag="output_text", tag_field="type"):
    text: str = ""
    annotations: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []


class ReasoningTextPart(Struct, tag="reasoning_text", tag_field="type"):
    text: str = ""


class OutputMessage(Struct, tag="message", tag_field="type", kw_only=True):
    """A message of the answer."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart]


class OutputReasoning(Struct, tag="reasoning", tag_field="type", kw_only=True):
    """The model's reasoning, without a summary."""

    id: str
    status: Status
    summary: list[dict[str, Any]] = []
    content: list[ReasoningTextPart]


class OutputFunctionCall(Struct, tag="function_call", tag_field="type", kw_only=True):
    """A function call. `arguments` are JSON exactly as the model wrote it."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class OutputCustomCall(Struct, tag="custom_tool_call", tag_field="type", kw_only=True):
    """A call of a custom tool."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str = ""
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class OutputLocalShellCall(Struct, tag="local_shell_call", tag_field="type", kw_only=True):
    """A call of the local shell."""

    id: str
    status: Status
    call_id: str
    action: dict[str, Any]


class OutputToolSearchCall(Struct, tag="tool_search_call", tag_field="type", kw_only=True):
    """A search for tools."""

    id: str
    status: Status
    call_id: str
    execution: Literal["client"] = "client"
    arguments: dict[str, Any]


OutputCall = OutputFunctionCall | OutputCustomCall | OutputLocalShellCall | OutputToolSearchCall
OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, kw_only=True):
    """Token counts. `reasoning_tokens` counts tokens up to the end of the reasoning; 0 without a
    reasoning parser."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: str
    message: str


class ResponseAnswer(Struct, kw_only=True):
    """Answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningConfig = msgspec.field(default_factory=ReasoningConfig)
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float | None = None
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(TextFormat()))
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


def begun_answer(
    body: ResponsesRequest, response_id: str, model: str, created_at: int
) -> ResponseAnswer:
    """Return an answer without output that echoes the request's parameters."""
    return ResponseAnswer(
        id=response_id,
        created_at=created_at,
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or ReasoningConfig(),
        temperature=body.temperature,
        text=TextConfig(
            body.text.format
            if body.text is not None and body.text.format is not None
            else TextFormat()
        ),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        user=body.user,
    )
