"""`/tokenize` and `/detokenize`: text to token ids and back, as the model's tokenizer does it."""

from __future__ import annotations

import asyncio

from starlette.routing import Route

from dovetail.front.chat import ChatOptions
from dovetail_server.errors import HttpError
from dovetail_server.exchange import Endpoint, Exchange
from dovetail_server.protocol.tokenize import DetokenizeRequest, TokenizeRequest


async def tokenize(exchange: Exchange) -> None:
    """Tell the tokens of a prompt, or of a conversation."""
    body = await exchange.body(TokenizeRequest)
    exchange.server.model_named(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "prompt: give either a prompt or messages", param="prompt")
    ids = await asyncio.to_thread(_token_ids, exchange, body)
    facts = exchange.engine.facts
    answer = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = exchange.engine.tokenizer.transformers.convert_ids_to_tokens(ids)
    await exchange.reply(answer)


def _token_ids(exchange: Exchange, body: TokenizeRequest) -> list[int]:
    engine = exchange.engine
    if body.messages is None:
        text, most = body.prompt or "", engine.facts.limits.max_chat_chars
        if len(text) > most:
            raise HttpError(400, f"prompt: at most {most} characters (limits.max_chat_chars), got {len(text)}", param="prompt")
        return engine.tokenizer.encode(text, body.add_special_tokens)
    options = ChatOptions(
        tools=body.tools,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt,
    )
    return list(engine.chat.prompt(body.messages, options).token_ids)


async def detokenize(exchange: Exchange) -> None:
    """Tell the text of tokens."""
    body = await exchange.body(DetokenizeRequest)
    exchange.server.model_named(body.model)
    await exchange.reply({"prompt": await asyncio.to_thread(_text, exchange, body.tokens)})


def _text(exchange: Exchange, tokens: list[int]) -> str:
    vocab_size, most = exchange.engine.facts.vocab_size, exchange.engine.facts.max_model_len
    if len(tokens) > most:
        raise HttpError(400, f"tokens: at most {most} (max_model_len), got {len(tokens)}", param="tokens")
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise HttpError(400, f"tokens[{index}]: a token id must be 0 to {vocab_size - 1}, got {token}", param=f"tokens[{index}]")
    return exchange.engine.tokenizer.decode(tokens)


ROUTES = [Route("/tokenize", Endpoint(tokenize), methods=["POST"]), Route("/detokenize", Endpoint(detokenize), methods=["POST"])]
