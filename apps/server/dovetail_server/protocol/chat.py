"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from dovetail.serving import ChatOptions
from dovetail_server.errors import HttpError
from dovetail_server.protocol import advisory
from dovetail_server.protocol.advisory import Advisory
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.images import refuse_images
from dovetail_server.protocol.openai_common import (
    OPENAI_ONLY,
    RENAMED,
    Conversation,
    OpenAIFields,
    sampling_params,
)
from dovetail_server.protocol.reasoning import Effort, asked_effort
from dovetail_server.protocol.structured import (
    ParamNames,
    ResponseFormat,
    ToolFunction,
    read_demand,
    read_tool_choice,
)


class ChatRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue."""

    ADVISORY: ClassVar[Sequence[Advisory]] = advisory.CHAT

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect: see `advisory`

    # Only some values are supported
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None

    def renamed(self) -> Mapping[str, str]:
        names = {**RENAMED, "prompt": "messages", "logprobs": "top_logprobs"}
        return names | ({"max_tokens": "max_completion_tokens"} if self.max_tokens is None else {})

    def to_conversation(self, *, images: bool) -> Conversation:
        """Return the request in canonical form. `images`: the model reads them. Raises `HttpError`
        for unsupported parameters, `RequestError` for invalid ones."""
        refuse_unsupported(self, ONLY)
        if not images:
            refuse_images(self.messages)
        self.check_stream()
        if self.max_tokens is not None and self.max_completion_tokens not in (
            None,
            self.max_tokens,
        ):
            raise HttpError(
                400,
                "max_completion_tokens: max_tokens is its old name: give one of them",
                param="max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpError(400, "top_logprobs: it needs logprobs: true", param="top_logprobs")
        max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        tools = None if self.tool_choice == "none" else self.tools or None
        choice = read_tool_choice(self.tool_choice, self.parallel_tool_calls)
        options = ChatOptions(
            tools=tools,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )
        params = sampling_params(self, max_tokens=max_tokens, logprobs=self.told_logprobs)
        functions = [_function(tool) for tool in tools or ()]
        demand = read_demand(
            self,
            self.response_format,
            functions,
            choice,
            ParamNames(strict="tools[{}].function.strict"),
        )
        return Conversation(
            self.messages,
            options,
            params,
            demand,
            asked_effort("reasoning_effort", self.reasoning_effort),
        )

    def drop_images(self) -> None:
        """Release the messages, which aren't read once there is a prompt."""
        self.messages = []

    @property
    def told_logprobs(self) -> int | None:
        """How many alternatives to return with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _function(tool: Mapping[str, Any]) -> ToolFunction:
    """Read a tool leniently: the chat front end validates it."""
    function = tool.get("function", tool)
    function = function if isinstance(function, Mapping) else {}
    return ToolFunction(
        str(function.get("name")), function.get("parameters"), bool(function.get("strict")), tool
    )


ONLY = (
    *OPENAI_ONLY,
    Only("modalities", (["text"],), 'only ["text"] is supported: models here read and write text'),
    Only("audio", (), "models here write text"),
    Only(
        "prediction",
        (),
        "it would only be drafts, which the engine takes from the prompt (speculation in its "
        "config): leave it out",
    ),
    Only("functions", (), "use tools, which replaced it"),
    Only("function_call", (), "use tool_choice, which replaced it"),
    Only("web_search_options", (), "the server searches no web"),
)
