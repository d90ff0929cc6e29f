"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.front.chat import ChatOptions
from dovetail.sampling_params import SamplingParams
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.openai_common import OPENAI_ONLY, RENAMED, OpenAIFields, check_stream, sampling_params
from dovetail_server.protocol.structured import Demand, ResponseFormat, calls_of, chosen_function, demand_of


class ChatRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation to go on with."""

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

    # Not every value is supported
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


ONLY = (
    *OPENAI_ONLY,
    Only("modalities", (["text"],), 'only ["text"] is supported: models here read and write text'),
    Only("audio", (), "models here write text"),
    Only("prediction", (), "predicted outputs aren't supported"),
    Only("functions", (), "use tools, which replaced it"),
    Only("function_call", (), "use tool_choice, which replaced it"),
    Only("web_search_options", (), "the server searches no web"),
    Only("reasoning_effort", (), "give the chat template's own variable in chat_template_kwargs"),
    Only("verbosity", ("medium",), "no model here knows it"),
)


def chat_demand(body: ChatRequest) -> Demand:
    """Return what is demanded of the answer's form. Raises `HttpError`, `RequestError`."""
    required, name = chosen_function("tool_choice", body.tool_choice)
    tools = [] if body.tool_choice == "none" else [_tool(tool) for tool in body.tools or ()]
    parallel = ("parallel_tool_calls", body.parallel_tool_calls is not False)
    calls = calls_of(tools, ("tool_choice", required, name), parallel=parallel, strict="tools[{}].function.strict")
    return demand_of(body, ("response_format", body.response_format), calls, has_tools=bool(tools))


def _tool(tool: Mapping[str, Any]) -> tuple[str, Any, bool]:
    """Name, schema and strictness of a tool; whether it is one at all, the chat front end checks."""
    function = tool.get("function", tool)
    function = function if isinstance(function, Mapping) else {}
    return str(function.get("name")), function.get("parameters"), bool(function.get("strict"))


def chat_options(body: ChatRequest) -> ChatOptions:
    """Return how the conversation becomes a prompt. Raises `RequestError`."""
    return ChatOptions(
        tools=None if body.tool_choice == "none" or not body.tools else body.tools,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt,
    )


def chat_params(body: ChatRequest) -> SamplingParams:
    """Return the parameters of the answer. Raises `HttpError` for what isn't supported, `RequestError` for what is wrong."""
    refuse_unsupported(body, ONLY)
    check_stream(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise HttpError(400, "max_completion_tokens: max_tokens is its old name: give one of them", param="max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs: it needs logprobs: true", param="top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return sampling_params(body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def renamed_fields(body: ChatRequest) -> dict[str, str]:
    """Return the names that the client used, by those that errors of the engine use."""
    names = {**RENAMED, "prompt": "messages", "logprobs": "top_logprobs"}
    return names | ({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {})
