"""Bodies of `/v1/messages` and `/v1/messages/count_tokens` (Anthropic's Messages API), and their
conversion to a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from dovetail.errors import RequestError
from dovetail.serving import ChatOptions, image_of_base64, image_of_text
from dovetail_server.errors import HttpError
from dovetail_server.protocol import advisory
from dovetail_server.protocol.advisory import LEFT_OUT, Advisory
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.images import image_not_read, image_part, text_part
from dovetail_server.protocol.openai_common import Conversation, GenerationFields, sampling_params
from dovetail_server.protocol.reasoning import AskedReasoning, Effort
from dovetail_server.protocol.structured import (
    CallChoice,
    MessageJsonSchemaFormat,
    ParamNames,
    ToolFunction,
    read_demand,
)
from dovetail_server.protocol.tools import read_tools

# --- requests -------------------------------------------------------------------------------------


class _Block(Struct, forbid_unknown_fields=True, tag_field="type"):
    """A content block of a request."""


class CacheControl(Struct, forbid_unknown_fields=True):
    """No-op: the prefix cache always keeps prompts while there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(_Block, tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class OnlyText(Struct, forbid_unknown_fields=True):
    """Text where no other block type is allowed: msgspec doesn't require the tag of a single tagged
    struct."""

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


class ResultText(_Block, tag="text"):
    """Text of a tool's result."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ToolReference(_Block, tag="tool_reference"):
    """A tool that a client's search has found. The model sees its name, and all tools in any
    case."""

    tool_name: str
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return self.tool_name


class _Source(Struct, forbid_unknown_fields=True, tag_field="type"):
    """The content of an image."""


class Base64Source(_Source, tag="base64"):
    """The image's file. Its format is read from its content."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(_Source, tag="url"):
    """A URL of a host that `media.hosts` names, or a `data:` URL."""

    url: str


class FileSource(_Source, tag="file"):
    """A file of Anthropic's Files API, which isn't served."""

    file_id: str


class ImageBlock(_Block, tag="image"):
    """An image. If the model reads none, one in a tool's result is replaced by `text`: without
    that, each later request of the conversation would be refused for what the tool returned."""

    source: Base64Source | UrlSource | FileSource
    cache_control: CacheControl | None = None
    transformations: dict[str, Any] | None = None  # without effect: see `advisory`

    @property
    def text(self) -> str:
        return LEFT_OUT.format("an image")

    def part(self, place: str) -> dict[str, Any]:
        """Return it as a part of OpenAI's chat format. Raises `RequestError`."""
        match self.source:
            case Base64Source(data=data):
                return image_part(image_of_base64(data, place))
            case UrlSource(url=url):
                return image_part(image_of_text(url, place))
        raise RequestError(f"{place}.source: files aren't stored here: send the image as base64")


class ResultDocument(_Block, tag="document"):
    """A document in a tool's result. The model reads that there is one."""

    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return LEFT_OUT.format("a document")


class ToolResultBlock(_Block, tag="tool_result"):
    """The result of a tool call. With `is_error` the model sees it prefixed with `Error: `."""

    tool_use_id: str
    content: str | list[ResultText | ToolReference | ImageBlock | ResultDocument] = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class InputMessage(Struct, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class Tool(Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    input_examples: None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """`auto`: the model decides. `none`: it doesn't see the tools. `any`: it must call one. `tool`:
    it must call the named one."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """`disabled` turns the model's reasoning off, `enabled` on, with at most `budget_tokens`
    tokens; `adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ContextEdit(Struct, tag_field="type", tag="clear_tool_uses_20250919"):
    """Removal of old tool results, which isn't done."""


class ThinkingEdit(Struct, tag_field="type", tag="clear_thinking_20251015"):
    """Removal of old reasoning, which chat templates do themselves."""


class ContextManagement(Struct, forbid_unknown_fields=True):
    """Edits of a conversation that is too long for the model."""

    edits: list[ContextEdit | ThinkingEdit] = []


class Metadata(Struct, forbid_unknown_fields=True):
    """Metadata without effect on the answer."""

    user_id: str | None = None


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The form of the answer, and how much the model may reason."""

    effort: Effort | None = None
    format: MessageJsonSchemaFormat | None = None


_TOOL_SCHEMA = Meta(extra_json_schema={"$ref": "#/components/schemas/Tool"})


class MessagesFields(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that the bodies of both endpoints share."""

    ADVISORY: ClassVar[Sequence[Advisory]] = advisory.MESSAGES

    messages: list[InputMessage]
    system: str | list[OnlyText] | None = None
    tools: list[Annotated[dict[str, Any], _TOOL_SCHEMA]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None

    output_config: OutputConfig | None = None

    service_tier: Literal["auto", "standard_only"] | None = None  # there is one tier

    # Without effect: see `advisory`
    metadata: Metadata | None = None
    inference_geo: str | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard", "fast"] | None = None

    # Refused
    container: Any = None
    diagnostics: Any = None
    mcp_servers: Any = None

    def renamed(self) -> Mapping[str, str]:
        return {
            "stop": "stop_sequences",
            "prompt": "messages",
            "conversation": "messages",
            "a": "messages",
        }

    def function_tools(self) -> list[ToolFunction]:
        """Return the tools that the model may call. Raises `HttpError` and `RequestError` for
        invalid ones."""
        tools = read_tools(self.tools or (), Tool)
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [
            ToolFunction.of(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in tools
        ]

    def chat_options(self, tools: Sequence[ToolFunction]) -> ChatOptions:
        """Return the options for rendering the conversation. Raises `RequestError`, and `HttpError`
        naming an option that this server can't honour."""
        refuse_unsupported(self, ONLY)
        return ChatOptions(
            tools=[tool.template for tool in tools] or None,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=bool(self.messages) and self.messages[-1].role == "assistant",
        )

    @property
    def reasoning(self) -> AskedReasoning:
        """The `thinking` and `output_config.effort` of the request, in the form that all APIs
        share."""
        thinking = self.thinking or Thinking("adaptive")
        effort = None if self.output_config is None else self.output_config.effort
        on = {"enabled": True, "disabled": False}.get(thinking.type)
        off = on is None and effort == "none"
        return AskedReasoning(
            False if off else on,
            thinking.budget_tokens,
            effort,
            "output_config.effort" if off else "thinking",
            "output_config.effort",
        )


class MessagesRequest(MessagesFields, forbid_unknown_fields=True, kw_only=True):
    """A conversation to continue."""

    max_tokens: int

    def drop_images(self) -> None:
        """Release the messages, which aren't read once there is a prompt."""
        self.messages = []

    def to_conversation(self, *, images: bool) -> Conversation:
        """Return the request in canonical form. `images`: the model reads them. Raises `HttpError`
        for unsupported parameters, `RequestError` for invalid ones."""
        choice = self.tool_choice or ToolChoice("auto")
        if choice.type == "tool" and choice.name is None:
            raise HttpError(
                400,
                "tool_choice.name: type 'tool' needs the tool's name",
                param="tool_choice.name",
                code="missing_parameter",
            )
        name = choice.name if choice.type == "tool" else None
        parallel = (
            None
            if choice.disable_parallel_tool_use is None
            else not choice.disable_parallel_tool_use
        )
        demanded = CallChoice(choice.type in ("any", "tool"), name, parallel)
        form = None if self.output_config is None else self.output_config.format
        params = sampling_params(self, max_tokens=self.max_tokens, stop=self.stop_sequences)
        tools = self.function_tools()
        demand = read_demand(self, form, tools, demanded, _NAMES)
        messages = chat_messages(self, images=images)
        return Conversation(messages, self.chat_options(tools), params, demand, self.reasoning)


class CountTokensRequest(MessagesFields, forbid_unknown_fields=True, kw_only=True):
    """A conversation whose tokens are counted: a body of `/v1/messages`, where `max_tokens` is
    optional."""

    max_tokens: int | None = None


_NAMES = ParamNames("output_config.format", "tool_choice.disable_parallel_tool_use")
ONLY = (
    Only("container", (), "the server runs no code"),
    Only("diagnostics", (), "the server has none for requests"),
    Only(
        "mcp_servers",
        ([],),
        "the server connects to no MCP servers: let the client do it, and send their tools",
    ),
)


# --- conversations --------------------------------------------------------------------------------


def chat_messages(body: MessagesFields, *, images: bool = False) -> list[dict[str, Any]]:
    """Convert the messages to OpenAI's chat format. One message may become several, since each tool
    result is a message of its own. `images`: the model reads them. Raises `HttpError` and
    `RequestError` naming the wrong block."""
    messages: list[dict[str, Any]] = []
    if body.system:
        system = (
            body.system
            if isinstance(body.system, str)
            else [text_part(block.text) for block in body.system]
        )
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        place = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, place))
        else:
            messages.extend(_others(message.role, message.content, place, images=images))
    return messages


def _assistant(blocks: list[Any], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    for kind, name in ((ToolResultBlock, "tool_result"), (ImageBlock, "image")):
        if any(isinstance(block, kind) for block in blocks):
            raise RequestError(
                f"{place}: an assistant's message has no blocks of type {name!r}; they belong to "
                f"the user's next message"
            )
    if texts or not calls:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.input},
            }
            for call in calls
        ]
    return message


def _others(role: str, blocks: list[Any], place: str, *, images: bool) -> list[dict[str, Any]]:
    """Convert a user or system message: each tool result becomes a message, and so do the blocks
    between them."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        if isinstance(block, ToolResultBlock) and role == "user":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _result(block, f"{at}.content", images=images),
                }
            )
            continue
        part = _part(role, block, at, images=images)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(part)
        else:
            messages.append({"role": role, "content": [part]})
    if not messages:
        raise RequestError(f"{place} must have at least one block, got an empty list")
    return messages


def _part(role: str, block: Any, place: str, *, images: bool) -> dict[str, Any]:
    """Convert a block of a user or system message."""
    if isinstance(block, TextBlock):
        return text_part(block.text)
    if isinstance(block, ImageBlock) and role == "user":
        if not images:
            raise image_not_read(place, "image")
        return block.part(place)
    raise RequestError(f"{place}: blocks of this type aren't allowed in a message of role {role!r}")


def _result(block: ToolResultBlock, place: str, *, images: bool) -> str | list[dict[str, Any]]:
    """Convert the content of a tool's result: a text, unless the model reads images and there are
    some."""
    head = "Error: " if block.is_error else ""
    if isinstance(block.content, str):
        return head + block.content
    if not images or not any(isinstance(part, ImageBlock) for part in block.content):
        return head + "\n".join(part.text for part in block.content)
    parts = [text_part(head)] if head else []
    for index, part in enumerate(block.content):
        parts.append(
            part.part(f"{place}[{index}]") if isinstance(part, ImageBlock) else text_part(part.text)
        )
    return parts


# --- answers --------------------------------------------------------------------------------------


class TextAnswer(Struct, tag="text", tag_field="type"):
    text: str


class ThinkingAnswer(Struct, tag="thinking", tag_field="type"):
    """The model's reasoning. It isn't signed; the field exists because clients require it."""

    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, tag="tool_use", tag_field="type"):
    """A tool call. Arguments that aren't a JSON object (because the answer was cut off, say) become
    `{"INVALID_JSON": "…"}`."""

    id: str
    name: str
    input: dict[str, Any]


class Usage(Struct):
    """Token counts. `input_tokens` excludes tokens found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


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
