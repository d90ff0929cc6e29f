"""`/v1/chat/completions`: OpenAI's chat, whole or streamed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.routing import Route

from dovetail.api.parser import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dovetail.request.outputs import CompletionOutput, RequestOutput
from dovetail_server.exchange import Endpoint, Exchange, new_id
from dovetail_server.json_parts import Fields, Items
from dovetail_server.parsers.reader import AnswerReader, reasoning_tokens_of
from dovetail_server.protocol.answer_parts import AnswerParts, PartKind
from dovetail_server.protocol.chat import ChatRequest
from dovetail_server.protocol.openai_common import logprobs_json, prompt_logprobs_json
from dovetail_server.routes.answering import PreparedChat, prepare_chat
from dovetail_server.routes.choices import Choices, ChunkStream, token_ids_of_prompt, usage_of


async def chat(exchange: Exchange) -> None:
    """Answer a conversation."""
    ready = await prepare_chat(exchange, ChatRequest)
    name = new_id("chatcmpl")
    head = {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ready.model,
    }
    stream = (
        ChunkStream(exchange, ready.body, {**head, "object": "chat.completion.chunk"})
        if ready.body.stream
        else None
    )
    choices = ChatChoices(ready, stream)
    if stream is not None:
        exchange.on_finished = lambda: stream.finish([choices])
    await ready.run(choices, name)
    if stream is None:
        await exchange.reply_in_parts(
            Fields({**head, **choices.whole(), "usage": usage_of([choices])})
        )


@dataclass(slots=True)
class _Sample:
    """A sample's answer so far. The last four fields are collected for whole answers only."""

    reader: AnswerReader
    has_calls: bool = False
    parts: AnswerParts = field(default_factory=AnswerParts)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last: CompletionOutput | None = None

    def finish_reason(self, sample: CompletionOutput) -> str | None:
        """Return OpenAI's `finish_reason`."""
        return (
            "tool_calls"
            if sample.finish_reason == "stop" and self.has_calls and not self.reader.in_call
            else sample.finish_reason
        )


class ChatChoices(Choices):
    """Choices of a chat."""

    text_field: ClassVar = {"delta": {"content": "@"}}

    def __init__(self, ready: PreparedChat[ChatRequest], stream: ChunkStream | None) -> None:
        body = ready.body
        self._top = ready.body.told_logprobs
        super().__init__(
            ready.exchange,
            body,
            ready.params.n,
            stream,
            is_plain=ready.parsers[0] is None and self._top is None,
        )
        self._body = body
        self._samples = [_Sample(ready.reader(parser)) for parser in ready.parsers]
        self._last: RequestOutput | None = None

    @property
    def reasoning_tokens(self) -> int | None:
        return reasoning_tokens_of([sample.reader for sample in self._samples])

    def choices_of(
        self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> list[dict[str, Any]]:
        index = sample.index
        state = self._samples[sample.index]
        choices = []
        if is_first:
            choices.append(self._choice(index, delta={"role": "assistant", "content": ""}))
            if self._token_ids:
                choices[0]["prompt_token_ids"] = token_ids_of_prompt(output)
        deltas = [delta_json(one) for one in self._read(state, sample)]
        # even without text
        tells_tokens = bool(sample.token_ids) and (
            self._top is not None or self._token_ids or self._counts
        )
        if deltas or tells_tokens:
            new = [self._choice(index, delta=delta) for delta in deltas or [{"content": ""}]]
            if self._top is not None:
                new[0]["logprobs"] = self._logprobs_of(sample)
            if self._token_ids:
                new[0]["token_ids"] = list(sample.token_ids)
            choices += new
        if sample.finish_reason is not None:
            choices.append(
                {
                    **self._choice(index, delta={}),
                    "finish_reason": state.finish_reason(sample),
                    "stop_reason": sample.stop_reason,
                }
            )
        return choices

    def collect(self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool) -> None:
        state = self._samples[sample.index]
        state.parts.add(self._read(state, sample))
        state.token_ids += sample.token_ids
        if self._top is not None:
            state.logprobs += self._logprobs_of(sample)["content"]
        state.last = sample
        self._last = output

    def whole(self) -> dict[str, Any]:
        """Return the finished choices, and what belongs to the prompt."""
        choices = (self._whole(index, state) for index, state in enumerate(self._samples))
        whole: dict[str, Any] = {"choices": Items(map(Fields, choices))}
        if self._last is not None and self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs_json(self._last.prompt_logprobs)
        if self._last is not None and self._token_ids:
            whole["prompt_token_ids"] = token_ids_of_prompt(self._last)
        return whole

    def _read(self, state: _Sample, sample: CompletionOutput) -> list[Event]:
        events = list(state.reader.read(sample))
        state.has_calls |= any(type(one) is ToolCallStart for one in events)
        return events

    def _logprobs_of(self, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "content": logprobs_json(sample, self._top or 0, self.exchange.engine.tokenizer),
            "refusal": None,
        }

    def _whole(self, index: int, state: _Sample) -> dict[str, Any]:
        whole = self._choice(index, message=message_json(state.parts))
        if self._top is not None:
            whole["logprobs"] = Fields({"content": Items(state.logprobs), "refusal": None})
        if state.last is not None:
            whole |= {
                "finish_reason": state.finish_reason(state.last),
                "stop_reason": state.last.stop_reason,
            }
        return whole | ({"token_ids": state.token_ids} if self._token_ids else {})


def message_json(parts: AnswerParts) -> dict[str, Any]:
    """Return an answer as OpenAI's message of an assistant."""
    texts = {
        kind: "".join(part.text for part in parts.parts if part.kind is kind)
        for kind in (PartKind.TEXT, PartKind.REASONING)
    }
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
        for part in parts.parts
        if part.kind is PartKind.CALL
    ]
    content = texts[PartKind.TEXT]
    reasoning = texts[PartKind.REASONING]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content or None if calls else content,
        "refusal": None,
    }
    message["reasoning_content"] = message["reasoning"] = reasoning or None
    return message | ({"tool_calls": calls} if calls else {})


def delta_json(one: Event) -> dict[str, Any]:
    """Return a parser's event as the delta of a chunk."""
    match one:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index, call_id, name):
            return {
                "tool_calls": [
                    {
                        "index": index,
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                ]
            }
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


ROUTES = [Route("/v1/chat/completions", Endpoint(chat), methods=["POST"])]
