"""Bodies of `/v1/responses` (OpenAI's Responses API), and their conversion to a `Conversation`. The
server stores nothing between requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from dovetail.serving import ChatOptions
from dovetail_server.errors import HttpError
from dovetail_server.protocol import advisory
from dovetail_server.protocol.advisory import Advisory
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.openai_common import (
    Conversation,
    GenerationFields,
    ServiceTier,
    check_stream_options,
    sampling_params,
)
from dovetail_server.protocol.reasoning import Effort, asked_effort
from dovetail_server.protocol.response_items import (
    ITEMS,
    AdditionalToolsItem,
    Item,
    ToolSearchOutputItem,
    chat_messages,
    read_items,
)
from dovetail_server.protocol.response_tools import KINDS, ResponseTools
from dovetail_server.protocol.structured import (
    ParamNames,
    ResponsesFormat,
    read_demand,
    read_tool_choice,
)


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

    def to_conversation(self, *, images: bool) -> Conversation:
        """Return the request in canonical form. `images`: the model reads them. Raises `HttpError`
        for unsupported parameters, `RequestError` for invalid ones."""
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
        messages = chat_messages(self.instructions, items, images=images)
        return Conversation(messages, options, params, demand, reasoning)

    def drop_images(self) -> None:
        """Release the items that aren't read once there is a prompt: all but those with tools."""
        if not isinstance(self.input, str):
            items = self.input
            kept = [item for item in items if ITEMS.get(item.get("type", "")) in _WITH_TOOLS]
            self.input = kept or ""

    def known_tools(self, items: Sequence[Item] | None = None) -> ResponseTools:
        """Return the tools that the model may call. `items`: the input's, if they have been read.
        Raises `HttpError` and `RequestError`."""
        found = []
        for index, item in enumerate(read_items(self.input) if items is None else items):
            if isinstance(item, _WITH_TOOLS):
                found += [
                    (f"input[{index}].tools[{place}]", tool)
                    for place, tool in enumerate(item.tools)
                ]
        return ResponseTools(self.tools or (), found)

    @property
    def told_logprobs(self) -> int | None:
        """How many alternatives to return with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None


_WITH_TOOLS = (ToolSearchOutputItem, AdditionalToolsItem)
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
