"""`/v1/messages`: Anthropic's Messages API, whole or streamed; and `/v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.routing import Route

from dovetail_server.errors import anthropic_shape
from dovetail_server.exchange import Endpoint, Exchange, new_id
from dovetail_server.protocol.message_events import MessageWriter
from dovetail_server.protocol.messages import (
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    TokenCount,
    Usage,
    chat_messages,
)
from dovetail_server.routes.answering import Answer, prepare_chat, rendered, steered


async def messages(exchange: Exchange) -> None:
    """Answer a conversation."""
    ready = await prepare_chat(exchange, MessagesRequest)
    head = MessageAnswer(
        id=new_id("msg").replace("-", "_"), model=ready.model, content=[], usage=Usage(0, 0)
    )
    answer = Answer(ready, MessageWriter(head, ready.body.max_tokens))
    await ready.run(answer, head.id)
    if not ready.body.stream:
        await exchange.reply(msgspec.json.encode(answer.whole))


async def count_tokens(exchange: Exchange) -> None:
    """Count the tokens of a conversation as the model would read it."""
    body, _ = await exchange.generation_body(CountTokensRequest)
    options = await exchange.beside(lambda: body.chat_options(body.function_tools()))
    conversation = await exchange.beside(partial(chat_messages, body, images=exchange.reads_images))
    prompt = await rendered(exchange, conversation, steered(exchange, options, body.reasoning))
    await exchange.reply(msgspec.json.encode(TokenCount(len(prompt.token_ids))))


ROUTES = [
    Route("/v1/messages", Endpoint(messages, anthropic_shape), methods=["POST"]),
    Route("/v1/messages/count_tokens", Endpoint(count_tokens, anthropic_shape), methods=["POST"]),
]
