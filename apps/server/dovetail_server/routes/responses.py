"""`/v1/responses`: OpenAI's Responses API, whole or streamed. Nothing is stored."""

from __future__ import annotations

import time

import msgspec
from starlette.routing import Route

from dovetail_server.errors import HttpError
from dovetail_server.exchange import Endpoint, Exchange, new_id
from dovetail_server.protocol.response_answer import begun_answer
from dovetail_server.protocol.response_events import ResponseWriter
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.routes.answering import Answer, prepare_chat


async def responses(exchange: Exchange) -> None:
    """Answer a conversation."""
    ready = await prepare_chat(exchange, ResponsesRequest)
    head = begun_answer(ready.body, new_id("resp").replace("-", "_"), ready.model, int(time.time()))
    writer = ResponseWriter(head, await exchange.beside(ready.body.known_tools))
    answer = Answer(
        ready,
        writer,
        error_shape=writer.error if ready.body.stream else None,
        top_logprobs=ready.body.told_logprobs,
    )
    await ready.run(answer, head.id)
    if not ready.body.stream:
        await exchange.reply(msgspec.json.encode(answer.whole))


async def compact(exchange: Exchange) -> None:
    """Refuse to compact a conversation: what the API returns is encrypted, and its format is
    OpenAI's own."""
    raise HttpError(
        400,
        "/v1/responses/compact: the server compacts no conversations: ask for a summary in "
        "/v1/responses, as Codex does of most providers",
        code="unsupported_endpoint",
    )


ROUTES = [
    Route("/v1/responses", Endpoint(responses), methods=["POST"]),
    Route("/v1/responses/compact", Endpoint(compact), methods=["POST"], include_in_schema=False),
]
