"""Bodies of `/v1/messages` and `/v1/messages/count_tokens` (Anthropic's Messages API), and its conversations as the chat front end reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from dovetail.errors import RequestError
from dovetail.front.chat import ChatOptions
from dovetail.sampling_params import SamplingParams
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.openai_common import FurtherFields, sampling_params
from dovetail_server.protocol.structured import Demand, MessageJsonSchemaFormat, calls_of, demand_of

# --- requests -----------------------------------------------------------------------------------------------------------------------------------


class _Block(Struct, forbid_unknown_fields=True, tag_field="type"):
    """A content block of a request."""


class CacheControl(Struct, forbid_unknown_fields=True):
    """A hint that has nothing to do here: every prompt's blocks are kept for others with the same beginning, as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(_Block, tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class OnlyText(Struct, forbid_unknown_fields=True):
    """Text, where there is no other kind of block: msgspec doesn't ask for the tag of a tagged struct that is alone."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(_Block, tag="thinking"):
    """Thoughts of an earlier answer. Signatures aren't looked at."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, tag="tool_use"):
    """A call of a tool in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(_Block, tag="tool_result"):
    """A tool's answer to a call. That of a failed call (`is_error`) reaches the model with `Error: ` before it."""

    tool_use_id: str
    content: str | list[OnlyText] = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class InputMessage(Struct, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class Tool(Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    input_examples: None = None
    eager_input_streaming: bool | None = None  # arguments always come as they are generated
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """`auto`: the model decides. `none`: it isn't told of the tools. `any`: it calls one. `tool`: it calls the one with that name."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """`disabled` turns a template's thinking off, `adaptive` leaves it as the model has it. A budget can't be held yet."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    """Words about the request that change no answer."""

    user_id: str | None = None


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The form of the answer. Its effort is the chat template's matter (`chat_template_kwargs`)."""

    effort: str | None = None
    format: MessageJsonSchemaFormat | None = None


class Conversation(FurtherFields, forbid_unknown_fields=True, kw_only=True):
    """The fields that the bodies of both endpoints have."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[OnlyText] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None

    # `NO_EFFECT` has them
    metadata: Metadata | None = None
    inference_geo: str | None = None
    cache_control: CacheControl | None = None

    # Not every value is supported
    output_config: OutputConfig | None = None
    speed: str | None = None
    service_tier: str | None = None
    container: Any = None
    diagnostics: Any = None


class MessagesRequest(Conversation, forbid_unknown_fields=True, kw_only=True):
    """A conversation to go on with."""

    max_tokens: int


class CountTokensRequest(Conversation, forbid_unknown_fields=True, kw_only=True):
    """A conversation whose tokens are to be counted: a body of `/v1/messages` as it is, or without what tells how to answer."""

    max_tokens: int | None = None


RENAMED = {"stop": "stop_sequences", "prompt": "messages", "conversation": "messages", "a": "messages"}
NO_EFFECT = ("metadata", "inference_geo", "cache_control")
ONLY = (
    Only("speed", ("standard",), "the server has one speed"),
    Only("service_tier", ("auto", "standard_only"), "the server has one tier; `priority` is what schedulers look at"),
    Only("container", (), "the server runs no code"),
    Only("diagnostics", (), "the server has none for requests"),
)


def check_supported(body: Conversation) -> None:
    """Raises `HttpError` 400 naming an option that this server can't honour."""
    refuse_unsupported(body, ONLY)
    thinking, config = body.thinking, body.output_config
    if thinking is not None and (thinking.type == "enabled" or thinking.budget_tokens is not None):
        raise _refusal("thinking", "a budget can't be held; use {'type': 'adaptive'}, which leaves it to the model, or {'type': 'disabled'}")
    if config is not None and config.effort is not None:
        raise _refusal("output_config.effort", "give the chat template's own variable in chat_template_kwargs")


def _refusal(param: str, reason: str) -> HttpError:
    return HttpError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def answer_demand(body: Conversation) -> Demand:
    """Return what is demanded of the answer's form. Raises `HttpError`, `RequestError`."""
    choice = body.tool_choice or ToolChoice("auto")
    if choice.type == "tool" and choice.name is None:
        raise HttpError(400, "tool_choice.name: type 'tool' needs the tool's name", param="tool_choice.name", code="missing_parameter")
    given = [] if choice.type == "none" else [(tool.name, tool.input_schema, bool(tool.strict)) for tool in body.tools or ()]
    chosen = ("tool_choice", choice.type in ("any", "tool"), choice.name if choice.type == "tool" else None)
    parallel = ("tool_choice.disable_parallel_tool_use", not choice.disable_parallel_tool_use)
    calls = calls_of(given, chosen, parallel=parallel, strict="tools[{}].strict")
    form = None if body.output_config is None else ("output_config.format", body.output_config.format)
    return demand_of(body, form, calls, has_tools=bool(given))


def chat_options(body: Conversation, templates: Mapping[str, str]) -> ChatOptions:
    """Return how the conversation becomes a prompt. `templates`: the model's own. Raises `RequestError`."""
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type == "disabled" and any("think" in template for template in templates.values()):
        variables.setdefault("enable_thinking", False)  # a model whose templates know of no thoughts has none to leave out
    return ChatOptions(
        tools=tools(body),
        chat_template=body.chat_template,
        chat_template_kwargs=variables or None,
        continue_final_message=continues(body),
    )


def answer_params(body: MessagesRequest) -> SamplingParams:
    """Return the parameters of the answer. Raises `RequestError`."""
    return sampling_params(body, max_tokens=body.max_tokens, stop=body.stop_sequences)


# --- conversations ------------------------------------------------------------------------------------------------------------------------------


def conversation(body: Conversation) -> list[dict[str, Any]]:
    """Return the messages as the chat front end reads them. One of Anthropic's messages can make several: each tool's result has its own."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _content(body.system)})
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, f"messages[{index}].content"))
        else:
            messages.extend(_others(message.role, message.content, f"messages[{index}].content"))
    return messages


def tools(body: Conversation) -> list[dict[str, Any]] | None:
    """Return the tools as chat templates read them; None if the model isn't to call any."""
    if not body.tools or (body.tool_choice is not None and body.tool_choice.type == "none"):
        return None
    return [{"type": "function", "function": _function(tool)} for tool in body.tools]


def continues(body: Conversation) -> bool:
    """Return True if the last message is the beginning of the answer."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def _function(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": tool.input_schema}


def _content(blocks: str | list[OnlyText]) -> str | list[dict[str, Any]]:
    return blocks if isinstance(blocks, str) else [{"type": "text", "text": block.text} for block in blocks]


def _assistant(blocks: list[Any], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise RequestError(f"{place}: an assistant's message has no blocks of type 'tool_result'; they belong to the user's next message")
    if texts or not calls:
        message["content"] = "".join(block.text for block in texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}} for call in calls]
    return message


def _others(role: str, blocks: list[Any], place: str) -> list[dict[str, Any]]:
    """A user's or system's message: tools' results in messages of their own, what is between them in others."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and role == "user":
            messages.append(_result(block))
        elif not isinstance(block, TextBlock):
            raise RequestError(f"{place}[{index}]: a message of role {role!r} has no such block")
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"].append({"type": "text", "text": block.text})
        else:
            messages.append({"role": role, "content": [{"type": "text", "text": block.text}]})
    if not messages:
        raise RequestError(f"{place} must have at least one block, got an empty list")
    return messages


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content if isinstance(block.content, str) else "\n".join(part.text for part in block.content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {content}" if block.is_error else content}


# --- answers ------------------------------------------------------------------------------------------------------------------------------------


class TextAnswer(Struct, tag="text", tag_field="type"):
    text: str


class ThinkingAnswer(Struct, tag="thinking", tag_field="type"):
    """The model's thoughts. Nothing is signed here; the field is there for clients that ask for it."""

    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, tag="tool_use", tag_field="type"):
    """A call. Arguments that are no JSON object (of an answer that was cut, say) come as `{"INVALID_JSON": "…"}`."""

    id: str
    name: str
    input: dict[str, Any]


class Usage(Struct):
    """Tokens. `input_tokens` are those that weren't found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageAnswer(Struct, tag="message", tag_field="type", kw_only=True):
    """Answer of `/v1/messages`."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextAnswer | ThinkingAnswer | ToolUseAnswer]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage


class TokenCount(Struct):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class ErrorDetail(Struct):
    type: str
    message: str


class ErrorAnswer(Struct, tag="error", tag_field="type", kw_only=True):
    """An error in Anthropic's shape."""

    error: ErrorDetail
    request_id: str | None = None
