"""Bodies of `/v1/responses` (OpenAI's Responses API), and its items as the chat front end reads them. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from dovetail.checks import shown
from dovetail.errors import RequestError
from dovetail.front.chat import ChatOptions
from dovetail.sampling_params import SamplingParams
from dovetail_server.errors import HttpError
from dovetail_server.protocol import openai_common
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.openai_common import FurtherFields, sampling_params
from dovetail_server.protocol.structured import Demand, ResponsesFormat, TextFormat, calls_of, chosen_function, demand_of

# --- requests -----------------------------------------------------------------------------------------------------------------------------------

Status = Literal["in_progress", "completed", "incomplete"]


class _Part(Struct, forbid_unknown_fields=True, tag_field="type"):
    """A part of a message's content."""


class InputText(_Part, tag="input_text"):
    """Text of a user or developer."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # a hint that has nothing to do here: every prompt's blocks are kept for others


class OutputText(_Part, tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


class ReasoningText(_Part, tag="reasoning_text"):
    """Thoughts of an earlier answer."""

    text: str


class SummaryText(_Part, tag="summary_text"):
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
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None
    caller: dict[str, Any] | None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")


class FunctionCallOutputItem(_Item, kw_only=True):
    """A function's answer to a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    name: str | None = None
    namespace: None = None
    caller: dict[str, Any] | None = None


class ReasoningItem(_Item, kw_only=True):
    """Thoughts of an earlier answer; they belong to the assistant's next message or call."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")


class TextConfig(Struct, forbid_unknown_fields=True):
    """The form of the text."""

    format: ResponsesFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """How the model thinks. Its effort is the chat template's matter (`chat_template_kwargs`); thoughts are told in full, without a summary."""

    effort: None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Padding is never added."""

    include_obfuscation: bool | None = None


_ITEM_SCHEMA = Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in ITEMS.values()]})


class ResponsesRequest(FurtherFields, forbid_unknown_fields=True, kw_only=True):
    """A conversation to go on with."""

    model: str | None = None
    input: str | list[Annotated[dict[str, Any], _ITEM_SCHEMA]]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None  # thoughts are told in the open anyhow
    top_logprobs: int | None = None

    # `NO_EFFECT` has them
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # Not every value is supported
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    max_tool_calls: Any = None
    truncation: Any = None
    service_tier: Any = None
    context_management: Any = None
    moderation: Any = None


_LOGPROBS = "message.output_text.logprobs"
_NOTHING_STORED = "nothing is stored between requests: send the whole conversation in input"
NO_EFFECT = (*openai_common.NO_EFFECT, "prompt_cache_options")
ONLY = (
    Only("store", (False,), "answers aren't stored: leave it out, or give false"),
    Only("previous_response_id", (), _NOTHING_STORED),
    Only("conversation", (), _NOTHING_STORED),
    Only("prompt", (), "no prompts are stored: send its text in input"),
    Only("background", (False,), "answers aren't stored: leave it out, or give false"),
    Only("max_tool_calls", (), "there are no tools that the server itself calls"),
    Only("truncation", ("disabled",), "a conversation that doesn't fit the model is refused"),
    Only("service_tier", ("auto", "default"), 'there is one tier, "auto"; `priority` is what schedulers look at'),
    Only("context_management", (), "the conversation is read as it is sent"),
    Only("moderation", (), "the server has no moderation"),
)
RENAMED = {
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "conversation": "input",
    "a": "input",
}


def check_supported(body: ResponsesRequest) -> None:
    """Raises `HttpError` 400 naming an option that this server doesn't honour."""
    refuse_unsupported(body, ONLY)
    if body.top_logprobs and not tells_logprobs(body):
        raise HttpError(400, f'top_logprobs: it needs include: ["{_LOGPROBS}"]', param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options: only a stream has them: set stream to true", param="stream_options")


def answer_demand(body: ResponsesRequest) -> Demand:
    """Return what is demanded of the answer's form. Raises `HttpError`, `RequestError`."""
    required, name = chosen_function("tool_choice", body.tool_choice)
    given = [] if body.tool_choice == "none" else [(tool.name, tool.parameters, bool(tool.strict)) for tool in body.tools or ()]
    parallel = ("parallel_tool_calls", body.parallel_tool_calls is not False)
    calls = calls_of(given, ("tool_choice", required, name), parallel=parallel, strict="tools[{}].strict")
    form = None if body.text is None else ("text.format", body.text.format)
    return demand_of(body, form, calls, has_tools=bool(given))


def chat_options(body: ResponsesRequest) -> ChatOptions:
    """Return how the conversation becomes a prompt. Raises `RequestError`."""
    return ChatOptions(tools=tools(body), chat_template=body.chat_template, chat_template_kwargs=body.chat_template_kwargs)


def answer_params(body: ResponsesRequest) -> SamplingParams:
    """Return the parameters of the answer. Raises `RequestError`."""
    return sampling_params(body, max_tokens=body.max_output_tokens, logprobs=(body.top_logprobs or 0) if tells_logprobs(body) else None)


def tells_logprobs(body: ResponsesRequest) -> bool:
    """Return True if the answer is to tell the log-probabilities of its text's tokens."""
    return _LOGPROBS in (body.include or ())


# --- conversations ------------------------------------------------------------------------------------------------------------------------------


def read_items(items: str | Sequence[dict[str, Any]]) -> list[Item]:
    """Return the input's items. Raises `RequestError` naming the wrong one."""
    if isinstance(items, str):
        return [MessageItem(role="user", content=items)]
    if not items:
        raise RequestError("input must be text, or a list of one item or more, got an empty list")
    return [_read_item(item, f"input[{index}]") for index, item in enumerate(items)]


def _read_item(item: dict[str, Any], place: str) -> Item:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise RequestError(f"{place}.type must be one of {', '.join(ITEMS)}, got {shown(kind)}")
    try:
        return msgspec.convert(item, ITEMS[kind])
    except msgspec.ValidationError as error:
        raise RequestError(f"{place}: {str(error).replace('`$.', '`')}") from None


def conversation(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the items as messages that the chat front end reads. An assistant's thoughts, text and calls that follow each other are one message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _add_text(_assistant_message(messages), _text(item.content))
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content)})
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                calls = _assistant_message(messages).setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case ReasoningItem():
                thoughts = item.content if item.content is not None else item.summary
                message = _assistant_message(messages, new=True)
                message["reasoning_content"] = "\n".join(part.text for part in thoughts)
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")  # thoughts alone
    return messages


def _assistant_message(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """The last message if it is an assistant's that may go on, else a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or new:
        messages.append({"role": "assistant"})
    return messages[-1]


def _add_text(message: dict[str, Any], text: str) -> None:
    message["content"] = f"{message['content']}\n{text}" if message.get("content") else text


def _text(content: str | Sequence[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Return the tools as chat templates read them; None if the model isn't to call any."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [{"type": "function", "function": _function(tool)} for tool in body.tools]


def _function(tool: FunctionTool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": tool.parameters or {"type": "object", "properties": {}}}


# --- answers ------------------------------------------------------------------------------------------------------------------------------------


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
    """The model's thoughts. There is no summary of them."""

    id: str
    status: Status
    summary: list[dict[str, Any]] = []
    content: list[ReasoningTextPart]


class OutputFunctionCall(Struct, tag="function_call", tag_field="type", kw_only=True):
    """A call of a function. `arguments` are JSON as the model wrote it."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, kw_only=True):
    """Tokens. `reasoning_tokens` are those up to the end of the thoughts; 0 if the server looks for none."""

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
    tools: list[FunctionTool] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


def begun_answer(body: ResponsesRequest, response_id: str, model: str, created_at: int) -> ResponseAnswer:
    """Return an answer without output that repeats what the request asked for."""
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
        text=TextConfig(body.text.format if body.text is not None and body.text.format is not None else TextFormat()),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        user=body.user,
    )
