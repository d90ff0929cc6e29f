"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the model's tokenizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.routing import Route

from dovetail.serving import ChatOptions, check_prompt_chars
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.exchange import Endpoint, Exchange
from dovetail_server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from dovetail_server.routes.answering import rendered


async def tokenize(exchange: Exchange) -> None:
    """Tokenize a prompt or a conversation."""
    body = await exchange.body(TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "prompt: give either a prompt or messages", param="prompt")
    if body.messages is None:
        await exchange.reply(await exchange.prepared(partial(_of_text, exchange.engine, body)))
        return
    exchange.renamed = {"prompt": "messages"}
    options = ChatOptions(
        tools=body.tools,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt,
    )
    ids = list((await rendered(exchange, body.messages, options)).token_ids)
    await exchange.reply(await exchange.beside(partial(_answer, exchange.engine, body, ids)))


def _answer(engine: ServedEngine, body: TokenizeRequest, ids: list[int]) -> dict[str, Any]:
    answer = {"count": len(ids), "max_model_len": engine.info.intake.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = engine.tokenizer.token_strings(ids)
    return answer


def _of_text(engine: ServedEngine, body: TokenizeRequest) -> dict[str, Any]:
    text = body.prompt or ""
    intake = engine.info.intake
    check_prompt_chars(len(text), intake.limits, intake.max_model_len, engine.tokenizer)
    return _answer(engine, body, engine.tokenizer.encode(text, body.add_special_tokens))


async def detokenize(exchange: Exchange) -> None:
    """Decode tokens."""
    body = await exchange.body(DetokenizeRequest)
    intake = exchange.engine.info.intake
    if len(body.tokens) > intake.max_model_len:
        raise HttpError(
            400,
            f"tokens: at most {intake.max_model_len} (max_model_len), got {len(body.tokens)}",
            param="tokens",
        )
    for index, token in enumerate(body.tokens):
        if not 0 <= token < intake.vocab_size:
            raise HttpError(
                400,
                f"tokens[{index}]: a token id must be 0 to {intake.vocab_size - 1}, got {token}",
                param=f"tokens[{index}]",
            )
    await exchange.reply(
        {"prompt": await exchange.prepared(partial(exchange.engine.tokenizer.decode, body.tokens))}
    )


async def tokenizer_info(exchange: Exchange) -> None:
    """Describe the tokenizer as tokenizer_config.json does; `?model=` names the model. Unlike
    vLLM's, the answer has no names of files or directories."""
    exchange.read_query()
    await exchange.reply(exchange.engine.tokenizer.described())


ROUTES = [
    Route("/tokenize", Endpoint(tokenize), methods=["POST"]),
    Route("/detokenize", Endpoint(detokenize), methods=["POST"]),
    Route("/tokenizer_info", Endpoint(tokenizer_info), methods=["GET"]),
]
