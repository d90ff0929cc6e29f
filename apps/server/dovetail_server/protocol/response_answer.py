"""Answers of `/v1/responses` (OpenAI's Responses API)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from dovetail_server.protocol.response_items import Status
from dovetail_server.protocol.responses import ReasoningConfig, ResponsesRequest, TextConfig
from dovetail_server.protocol.structured import (
    TextFormat,
)


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
