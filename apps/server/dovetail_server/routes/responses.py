"""`/v1/responses`: OpenAI's Responses API, as one answer or as a stream. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from dovetail.request import CompletionOutput
from dovetail_server.constraining import constrained_chat
from dovetail_server.exchange import Endpoint, Exchange, Job, new_id
from dovetail_server.parsers import OutputParser
from dovetail_server.protocol.openai_common import engine_fields, logprobs_json
from dovetail_server.protocol.response_events import ResponseWriter, finished_answer
from dovetail_server.protocol.responses import (
    RENAMED,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseAnswer,
    ResponsesRequest,
    ResponseUsage,
    answer_demand,
    answer_params,
    begun_answer,
    chat_options,
    check_supported,
    conversation,
    read_items,
)
from dovetail_server.routes.answering import Answer, answer_parser, as_parsed, rendered


async def responses(exchange: Exchange) -> None:
    """Answer a conversation."""
    body = await exchange.body(ResponsesRequest)
    exchange.renamed = RENAMED
    model = exchange.record.model = exchange.server.model_named(body.model)
    check_supported(body)
    params, options, demand = exchange.check(answer_params(body)), chat_options(body), answer_demand(body)
    messages = conversation(body.instructions, read_items(body.input))
    params, prompt = constrained_chat(exchange, params, demand, options, await rendered(exchange, messages, options))
    parser = answer_parser(exchange, prompt, options)
    head = begun_answer(body, new_id("resp").replace("-", "_"), model, int(time.time()))
    told = ToldResponse(exchange, parser, head, ResponseWriter(head) if body.stream else None)
    told.top_logprobs = params.logprobs
    await exchange.run([Job(prompt, as_parsed(params, parser), told, engine_fields(body, exchange.engine))], head.id)
    if not body.stream:
        await exchange.reply(msgspec.json.encode(told.whole()))


class ToldResponse(Answer):
    """A response as it comes."""

    top_logprobs: int | None = None  # the likeliest tokens to tell beside each; None: no log-probabilities are told

    def __init__(self, exchange: Exchange, parser: OutputParser | None, head: ResponseAnswer, writer: ResponseWriter | None) -> None:
        super().__init__(exchange, parser, writer, None if writer is None else writer.error)
        self._head, self._events = head, writer

    def start(self) -> None:
        if self._events is not None:
            self._events.start()

    def end(self) -> None:
        if self._events is not None:
            self._events.finish(self.whole())

    def whole(self) -> ResponseAnswer:
        """Return the response, which has ended."""
        full = self.output.finish_reason == "length"
        return finished_answer(self._head, self.parts.parts, self._usage(), int(time.time()), full=full, cut=self.parts.cut)

    def logprobs_of(self, sample: CompletionOutput) -> Sequence[dict[str, Any]]:
        return () if self.top_logprobs is None else logprobs_json(sample, self.top_logprobs, self.exchange.engine.tokenizer)

    def _usage(self) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=self.prompt_tokens,
            input_tokens_details=InputTokensDetails(self.cached_tokens),
            output_tokens=self.completion_tokens,
            output_tokens_details=OutputTokensDetails(self.reader.reasoning_tokens or 0),
            total_tokens=self.prompt_tokens + self.completion_tokens,
        )


ROUTES = [Route("/v1/responses", Endpoint(responses), methods=["POST"])]
