"""Bodies of `/v1/messages` and `/v1/messages/count_tokens` (Anthropic's Messages API), and their conversion to a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from dovetail.errors import RequestError
from dovetail.front.chat import ChatOptions
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import Only, refuse_unsupported, unsupported
from dovetail_server.protocol.openai_common import Conversation, GenerationFields, sampling_params
from dovetail_server.protocol.structured import CallChoice, MessageJsonSchemaFormat, ParamNames, ToolFunction, read_demand

# --- requests -----------------------------------------------------------------------------------------------------------------------------------


class _Block(Struct, forbid_unknown_fields=True, tag_field="type"):
    """A content block of a request."""


class CacheControl(Struct, forbid_unknown_fields=True):
    """No-op: the prefix cache always keeps prompts while there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(_Block, tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class OnlyText(Struct, forbid_unknown_fields=True):
    """Text where no other block type is allowed: msgspec doesn't require the tag of a single tagged struct."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(_Block, tag="thinking"):
    """Reasoning of an earlier answer. Signatures are ignored."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, tag="tool_use"):
    """A tool call in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(_Block, tag="tool_result"):
    """The result of a tool call. With `is_error` the model sees it prefixed with `Error: `."""

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
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are generated
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """`auto`: the model decides. `none`: it doesn't see the tools. `any`: it must call one. `tool`: it must call the named one."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """`disabled` turns a template's thinking off, `adaptive` keeps the model's default. Budgets aren't supported yet."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    """Metadata without effect on the answer."""

    user_id: str | None = None


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The form of the answer. Effort is a variable of the chat template (`chat_template_kwargs`)."""

    effort: str | None = None
    format: MessageJsonSchemaFormat | None = None


class MessagesFields(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that the bodies of both endpoints share."""

    messages: list[InputMessage]
    system: str | list[OnlyText] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None

    # Accepted without effect: see `NO_EFFECT`
    metadata: Metadata | None = None
    inference_geo: str | None = None
    cache_control: CacheControl | None = None

    # Only some values are supported
    output_config: OutputConfig | None = None
    speed: str | None = None
    service_tier: str | None = None
    container: Any = None
    diagnostics: Any = None

    def renamed(self) -> Mapping[str, str]:
        return {"stop": "stop_sequences", "prompt": "messages", "conversation": "messages", "a": "messages"}

    def check_supported(self) -> None:
        """Raise `HttpError` 400 naming an option that this server can't honour."""
        refuse_unsupported(self, ONLY)
        thinking, config = self.thinking, self.output_config
        if thinking is not None and (thinking.type == "enabled" or thinking.budget_tokens is not None):
            reason = "budgets aren't supported; use {'type': 'adaptive'}, which leaves it to the model, or {'type': 'disabled'}"
            raise unsupported("thinking", reason)
        if config is not None and config.effort is not None:
            raise unsupported("output_config.effort", "pass the chat template's own variable in chat_template_kwargs")

    def function_tools(self) -> list[ToolFunction]:
        """Return the tools that the model may call."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [ToolFunction.of(tool.name, tool.description, tool.input_schema, tool.strict) for tool in self.tools or ()]

    def chat_options(self, templates: Mapping[str, str]) -> ChatOptions:
        """Return the options for rendering the conversation. `templates`: the model's own. Raises `RequestError`."""
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None and self.thinking.type == "disabled" and any("think" in template for template in templates.values()):
            variables.setdefault("enable_thinking", False)  # only for templates that support thinking
        return ChatOptions(
            tools=[tool.template for tool in self.function_tools()] or None,
            chat_template=self.chat_template,
            chat_template_kwargs=variables or None,
            continue_final_message=bool(self.messages) and self.messages[-1].role == "assistant",
        )


class MessagesRequest(MessagesFields, forbid_unknown_fields=True, kw_only=True):
    """A conversation to continue."""

    max_tokens: int

    def to_conversation(self, templates: Mapping[str, str]) -> Conversation:
        """Return the request in canonical form. `templates`: the model's chat templates by name. Raises `HttpError` for unsupported parameters,
        `RequestError` for invalid ones."""
        self.check_supported()
        choice = self.tool_choice or ToolChoice("auto")
        if choice.type == "tool" and choice.name is None:
            raise HttpError(400, "tool_choice.name: type 'tool' needs the tool's name", param="tool_choice.name", code="missing_parameter")
        name = choice.name if choice.type == "tool" else None
        demanded = CallChoice(choice.type in ("any", "tool"), name, not choice.disable_parallel_tool_use)
        form = None if self.output_config is None else self.output_config.format
        params = sampling_params(self, max_tokens=self.max_tokens, stop=self.stop_sequences)
        options = self.chat_options(templates)
        return Conversation(chat_messages(self), options, params, read_demand(self, form, self.function_tools(), demanded, _NAMES))


class CountTokensRequest(MessagesFields, forbid_unknown_fields=True, kw_only=True):
    """A conversation whose tokens are counted: a body of `/v1/messages`, where `max_tokens` is optional."""

    max_tokens: int | None = None


_NAMES = ParamNames("output_config.format", "tool_choice.disable_parallel_tool_use")
NO_EFFECT = ("metadata", "inference_geo", "cache_control")
ONLY = (
    Only("speed", ("standard",), "the server has one speed"),
    Only("service_tier", ("auto", "standard_only"), "the server has one tier; schedulers use `priority`"),
    Only("container", (), "the server runs no code"),
    Only("diagnostics", (), "the server has none for requests"),
)


# --- conversations ------------------------------------------------------------------------------------------------------------------------------


def chat_messages(body: MessagesFields) -> list[dict[str, Any]]:
    """Convert the messages to OpenAI's chat format. One message may become several, since each tool result is a message of its own."""
    messages: list[dict[str, Any]] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else [{"type": "text", "text": block.text} for block in body.system]
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        place = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, place))
        else:
            messages.extend(_others(message.role, message.content, place))
    return messages


def _assistant(blocks: list[Any], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise RequestError(f"{place}: an assistant's message has no blocks of type 'tool_result'; they belong to the user's next message")
    if texts or not calls:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}} for call in calls]
    return message


def _others(role: str, blocks: list[Any], place: str) -> list[dict[str, Any]]:
    """Convert a user or system message: each tool result becomes a message, and so does the text between them."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and role == "user":
            content = block.content if isinstance(block.content, str) else "\n".join(part.text for part in block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {content}" if block.is_error else content})
        elif not isinstance(block, TextBlock):
            raise RequestError(f"{place}[{index}]: blocks of this type aren't allowed in a message of role {role!r}")
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"].append({"type": "text", "text": block.text})
        else:
            messages.append({"role": role, "content": [{"type": "text", "text": block.text}]})
    if not messages:
        raise RequestError(f"{place} must have at least one block, got an empty list")
    return messages


# --- answers ------------------------------------------------------------------------------------------------------------------------------------


class TextAnswer(Struct, tag="text", tag_field="type"):
    text: str


class ThinkingAnswer(Struct, tag="thinking", tag_field="type"):
    """The model's reasoning. It isn't signed; the field exists because clients require it."""

    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, tag="tool_use", tag_field="type"):
    """A tool call. Arguments that aren't a JSON object (because the answer was cut off, say) become `{"INVALID_JSON": "…"}`."""

    id: str
    name: str
    input: dict[str, Any]


class Usage(Struct):
    """Token counts. `input_tokens` excludes tokens found in the prefix cache."""

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
    """An error in Anthropic's format."""

    error: ErrorDetail
    request_id: str | None = None
