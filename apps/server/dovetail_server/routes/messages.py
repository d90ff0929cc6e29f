"""`/v1/messages`: Anthropic's Messages API, as one answer or as a stream; and `/v1/messages/count_tokens`."""

from __future__ import annotations

import msgspec
from starlette.routing import Route

from dovetail_server.constraining import constrained_chat
from dovetail_server.errors import anthropic_shape
from dovetail_server.exchange import Endpoint, Exchange, Job, new_id
from dovetail_server.parsers import OutputParser
from dovetail_server.protocol.message_events import PING, MessageWriter, content_of, stop_of
from dovetail_server.protocol.messages import (
    RENAMED,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    StopReason,
    TokenCount,
    Usage,
    answer_demand,
    answer_params,
    chat_options,
    check_supported,
    conversation,
)
from dovetail_server.protocol.openai_common import engine_fields
from dovetail_server.routes.answering import Answer, answer_parser, as_parsed, rendered


async def messages(exchange: Exchange) -> None:
    """Answer a conversation."""
    body = await exchange.body(MessagesRequest)
    exchange.renamed = RENAMED
    model = exchange.record.model = exchange.server.model_named(body.model)
    check_supported(body)
    params, options = exchange.check(answer_params(body)), chat_options(body, exchange.engine.tokenizer.chat_templates)
    demand = answer_demand(body)
    params, prompt = constrained_chat(exchange, params, demand, options, await rendered(exchange, conversation(body), options))
    parser = answer_parser(exchange, prompt, options)
    head = MessageAnswer(id=new_id("msg").replace("-", "_"), model=model, content=[], usage=Usage(0, 0))
    told = ToldMessage(exchange, parser, head, body.max_tokens, MessageWriter() if body.stream else None)
    await exchange.run([Job(prompt, as_parsed(params, parser), told, engine_fields(body, exchange.engine))], head.id)
    if not body.stream:
        await exchange.reply(msgspec.json.encode(told.whole()))


async def count_tokens(exchange: Exchange) -> None:
    """Count the tokens of a conversation as the model would read it."""
    body = await exchange.body(CountTokensRequest)
    exchange.renamed = RENAMED
    exchange.record.model = exchange.server.model_named(body.model)
    check_supported(body)
    options = chat_options(body, exchange.engine.tokenizer.chat_templates)
    prompt = await rendered(exchange, conversation(body), options)
    await exchange.reply(msgspec.json.encode(TokenCount(len(prompt.token_ids))))


class ToldMessage(Answer):
    """A message as it comes."""

    def __init__(self, exchange: Exchange, parser: OutputParser | None, head: MessageAnswer, max_tokens: int, writer: MessageWriter | None) -> None:
        super().__init__(exchange, parser, writer)
        self._head, self._max_tokens, self._events = head, max_tokens, writer

    def start(self) -> None:
        if self._events is not None and self._stream is not None:
            self._stream.ping(PING)
            self._events.start(msgspec.structs.replace(self._head, usage=self._usage()))

    def end(self) -> None:
        if self._events is not None:
            self._events.finish(*self._stop(), self._usage())

    def whole(self) -> MessageAnswer:
        """Return the message, which has ended."""
        reason, sequence = self._stop()
        content = content_of(self.parts.parts)
        return msgspec.structs.replace(self._head, content=content, stop_reason=reason, stop_sequence=sequence, usage=self._usage())

    def _stop(self) -> tuple[StopReason, str | None]:
        return stop_of(self.output, self.parts, used_tokens=self.completion_tokens, max_tokens=self._max_tokens)

    def _usage(self) -> Usage:
        cached = self.cached_tokens
        return Usage(self.prompt_tokens - cached, self.completion_tokens, cache_read_input_tokens=cached)


ROUTES = [
    Route("/v1/messages", Endpoint(messages, anthropic_shape), methods=["POST"]),
    Route("/v1/messages/count_tokens", Endpoint(count_tokens, anthropic_shape), methods=["POST"]),
]
