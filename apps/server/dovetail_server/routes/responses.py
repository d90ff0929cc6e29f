"""`/v1/responses`: OpenAI's Responses API, whole or streamed. Nothing is stored."""

from __future__ import annotations

import time

import msgspec
from starlette.routing import Route

from dovetail_server.exchange import Endpoint, Exchange, new_id
from dovetail_server.protocol.response_events import ResponseWriter
from dovetail_server.protocol.responses import ResponsesRequest, begun_answer
from dovetail_server.routes.answering import Answer, prepare_chat


async def responses(exchange: Exchange) -> None:
    """Answer a conversation."""
    ready = await prepare_chat(exchange, ResponsesRequest)
    head = begun_answer(ready.body, new_id("resp").replace("-", "_"), ready.model, int(time.time()))
    writer = ResponseWriter(head)
    answer = Answer(ready, writer, error_shape=writer.error if ready.body.stream else None, top_logprobs=ready.body.told_logprobs)
    await ready.run(answer, head.id)
    if not ready.body.stream:
        await exchange.reply(msgspec.json.encode(answer.whole))


ROUTES = [Route("/v1/responses", Endpoint(responses), methods=["POST"])]
