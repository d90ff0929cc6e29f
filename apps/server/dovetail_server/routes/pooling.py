"""`/v1/embeddings`, `/v1/score`, `/v1/rerank` and their other names, `/classify` and `/pooling`:
requests that end with their prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.routing import Route

from dovetail.request.pooling import PoolingParams
from dovetail.serving import Prompt, ScorePlan, at_most
from dovetail_server.errors import HttpError
from dovetail_server.exchange import Endpoint, Exchange, new_id
from dovetail_server.json_parts import Fields, Items, Numbers
from dovetail_server.listeners import PooledListener
from dovetail_server.protocol import pooling as protocol
from dovetail_server.protocol.advisory import ignored_fields
from dovetail_server.protocol.decoding import refuse_unsupported
from dovetail_server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

B = TypeVar("B", bound=PoolingFields)

NUMBER_BYTES = 16  # of a number of an array and the comma after it, at most
BASE64_BYTES = 16 / 3
_PRODUCTS_A_CHAR = 2**14  # of two texts' vectors, in the time that tokenizing a character takes
_SHORT = 1000  # characters: in about a millisecond


async def embeddings(exchange: Exchange) -> None:
    """Embed texts or token ids."""
    body, model = await _read(exchange, EmbeddingRequest)
    params = body.params(task="embed", dimensions=body.dimensions)
    listeners = await _pool(exchange, body, params, "embd", body.prompt_name)
    await _reply(
        exchange,
        "embd",
        model,
        "embedding",
        ({"embedding": _told(one.data, body)} for one in listeners),
        listeners,
    )


async def pooling(exchange: Exchange) -> None:
    """Do any of the model's tasks with texts or token ids."""
    body, model = await _read(exchange, PoolingRequest)
    params = body.params(task=body.task, dimensions=body.dimensions)
    is_sparse = body.task == "embed_sparse"
    if is_sparse and body.encoding_format == "base64":
        raise HttpError(
            400, "encoding_format: lexical weights are given as numbers", param="encoding_format"
        )
    listeners = await _pool(exchange, body, params, "pool", body.prompt_name)
    await _reply(
        exchange,
        "pool",
        model,
        "pooling",
        ({"data": _weights(one) if is_sparse else _told(one.data, body)} for one in listeners),
        listeners,
    )


async def classify(exchange: Exchange) -> None:
    """Classify texts or token ids."""
    body, model = await _read(exchange, ClassifyRequest)
    listeners = await _pool(exchange, body, body.params(task="classify"), "classify")
    labels = exchange.engine.pooling.facts.capacity.labels
    told = (
        {
            "label": labels[int(one.data.argmax())],
            "probs": Numbers(one.data),
            "num_classes": len(labels),
        }
        for one in listeners
    )
    await _reply(exchange, "classify", model, "classification", told, listeners)


async def score(exchange: Exchange) -> None:
    """Score pairs of texts."""
    body, model = await _read(exchange, ScoreRequest)
    pairs = body.pairs(exchange.engine.info.intake.limits)
    scores, listeners = await _scores(exchange, body, pairs, body.template, "score")
    await _reply(exchange, "score", model, "score", ({"score": one} for one in scores), listeners)


async def rerank(exchange: Exchange, version: int = 1) -> None:
    """Rank documents by their relevance to a query: in Jina's form, or in that of version 2 of
    Cohere's API, which returns documents only if asked to."""
    body, model = await _read(exchange, RerankRequest)
    refuse_unsupported(body, protocol.ONLY)
    texts = body.texts(exchange.engine.info.intake.limits)
    scores, listeners = await _scores(
        exchange, body, [(body.query, text) for text in texts], body.template, "rerank"
    )
    best = sorted(range(len(texts)), key=lambda place: -scores[place])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": place, "relevance_score": scores[place]} for place in best
    ]
    if body.return_documents if body.return_documents is not None else version == 1:
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    usage = _usage(listeners)
    answer = {"id": new_id("rerank"), "model": model, "results": Items(results), "usage": usage}
    if version == 2:
        answer["meta"] = {
            "api_version": {"version": "2"},
            "tokens": {"input_tokens": usage["prompt_tokens"], "output_tokens": 0},
        }
    await exchange.reply_in_parts(Fields(answer))


async def _read(exchange: Exchange, kind: type[B]) -> tuple[B, str]:
    """Decode a body; return it and the model name for the answer. Raises what `Exchange.body` and
    `ignore` do."""
    body = await exchange.body(kind)
    exchange.renamed = {
        "id": "request_id",
        "deadline": "deadline_s",
        "prompt": "documents" if kind is RerankRequest else "input",
    }
    for one in ignored_fields(body, body.ADVISORY):
        exchange.ignore(one)
    return body, exchange.answering(body.model)


async def _pool(
    exchange: Exchange,
    body: ClassifyRequest,
    params: PoolingParams,
    name: str,
    prompt_name: str | None = None,
) -> list[PooledListener]:
    """Pool each prompt of a body, and return the listeners, which have the results."""
    made = exchange.engine.pooling
    prompts = body.prompts(exchange.engine.info.intake.limits)
    prompts = await exchange.made(made.source(prompts, [params] * len(prompts), prompt_name))
    _check_answer(exchange, prompts, params, body)
    listeners = [PooledListener(exchange) for _ in prompts]
    await exchange.run(
        new_id(name),
        params,
        body.engine_fields(exchange.engine),
        list(zip(prompts, listeners, strict=True)),
    )
    return listeners


async def _scores(
    exchange: Exchange,
    body: PoolingFields,
    pairs: Sequence[tuple[str, str]],
    template: str | None,
    name: str,
) -> tuple[list[float], list[PooledListener]]:
    """Score pairs of texts; return the scores, and the listeners of what was computed for them."""
    plan = exchange.engine.pooling.plan_scores(pairs, body.params(), template)
    prompts = await exchange.made(plan.prompts)
    if plan.compares_tokens:
        _check_vectors(exchange, prompts, plan.params)
    listeners = [PooledListener(exchange) for _ in prompts]
    await exchange.run(
        new_id(name),
        plan.params,
        body.engine_fields(exchange.engine),
        list(zip(prompts, listeners, strict=True)),
    )
    results = [
        [listeners[place].data for place in plan.of_pair(pair)] for pair in range(len(pairs))
    ]
    if not plan.compares_tokens:
        return [plan.score(result) for result in results], listeners
    async with exchange.attended():
        return [await _compared(exchange, plan, result) for result in results], listeners


async def _compared(
    exchange: Exchange, plan: ScorePlan, result: Sequence[NDArray[np.float32]]
) -> float:
    """Compare the vectors of two texts, in a thread, in its client's turn if it takes long."""
    first, second = result
    cost = len(first) * second.size // _PRODUCTS_A_CHAR
    if cost < _SHORT:
        return plan.score(result)
    preparing = exchange.server.preparing
    return await preparing.run(exchange.client, cost, partial(plan.score, result))


def _check_answer(
    exchange: Exchange, prompts: Sequence[Prompt], params: PoolingParams, body: ClassifyRequest
) -> None:
    """Raise `RequestError` if the answer would be too large, before anything is computed for it."""
    numbers = exchange.engine.pooling.numbers(prompts, params)
    size = BASE64_BYTES if getattr(body, "encoding_format", None) == "base64" else NUMBER_BYTES
    limits = exchange.engine.info.intake.limits
    what = (
        "input: the bytes of the answer (fewer texts, smaller truncate_prompt_tokens or "
        "dimensions, or base64 take less)"
    )
    at_most(what, math.ceil(numbers * size), limits, "max_answer_bytes")


def _check_vectors(exchange: Exchange, prompts: Sequence[Prompt], params: PoolingParams) -> None:
    """Raise `RequestError` if the vectors to compare would be too large, before anything is
    computed for them."""
    numbers = exchange.engine.pooling.numbers(prompts, params)
    what = (
        "documents: the bytes of their tokens' vectors (fewer documents or a smaller "
        "truncate_prompt_tokens take less)"
    )
    limits = exchange.engine.info.intake.limits
    at_most(what, numbers * np.float32().itemsize, limits, "max_answer_bytes")


def _weights(listener: PooledListener) -> Items:
    """Return lexical weights as text-embeddings-inference does."""
    ids = () if listener.token_ids is None else listener.token_ids.tolist()
    weights = zip(ids, listener.data.tolist(), strict=True)
    return Items({"index": index, "value": value} for index, value in weights)


def _told(data: NDArray[np.float32], body: EmbeddingRequest) -> Numbers:
    """Return an array as the body asks for it."""
    return Numbers(data, as_base64=body.encoding_format == "base64")


def _usage(listeners: Sequence[PooledListener]) -> dict[str, int]:
    tokens = sum(one.prompt_tokens for one in listeners)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def _reply(
    exchange: Exchange,
    name: str,
    model: str,
    kind: str,
    data: Iterable[Mapping[str, Any]],
    listeners: Sequence[PooledListener],
) -> None:
    items = Items(Fields({"object": kind, "index": index, **one}) for index, one in enumerate(data))
    answer = {
        "id": new_id(name),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": items,
        "usage": _usage(listeners),
    }
    await exchange.reply_in_parts(Fields(answer))


ROUTES = [
    Route("/v1/embeddings", Endpoint(embeddings), methods=["POST"]),
    *(Route(path, Endpoint(score), methods=["POST"]) for path in ("/v1/score", "/score")),
    *(Route(path, Endpoint(rerank), methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
    Route("/v2/rerank", Endpoint(partial(rerank, version=2)), methods=["POST"]),
    *(Route(path, Endpoint(classify), methods=["POST"]) for path in ("/v1/classify", "/classify")),
    Route("/pooling", Endpoint(pooling), methods=["POST"]),
]
