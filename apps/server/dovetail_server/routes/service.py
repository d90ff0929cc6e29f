"""Endpoints about the server itself: /v1/models, /health, /ping, /ready, /load, /version,
/openapi.json."""

from __future__ import annotations

import importlib.metadata

from starlette.datastructures import QueryParams
from starlette.routing import Route

from dovetail.errors import DISTRIBUTION, DovetailError
from dovetail_server.batches.worker import BatchWorker
from dovetail_server.errors import HttpError, anthropic_shape, without_paths
from dovetail_server.exchange import Endpoint, Exchange
from dovetail_server.models import Model
from dovetail_server.protocol.models import (
    ServedModel,
    anthropic_list,
    anthropic_model,
    openai_list,
    openai_model,
)
from dovetail_server.protocol.openapi import document


async def health(exchange: Exchange) -> None:
    """200 while the server works; 503 with the reason if all engines, this front end or the
    supervisor are dead or hang. `down`: why an engine is down while others work, by its model.
    `batches`: the state of /v1/batches."""
    _check_health(exchange)
    lost = exchange.server.models.down()
    down = {name: without_paths(reason) for name, reason in lost.items()}  # no key is asked for
    answer = {"status": "degraded", "down": down} if down else {"status": "ok"}
    worker: BatchWorker | None = exchange.scope["app"].state.batch_worker
    await exchange.reply(answer | ({"batches": worker.status} if worker is not None else {}))


async def ready(exchange: Exchange) -> None:
    """200 while new requests are accepted; 503 while draining or unhealthy."""
    _check_health(exchange)
    exchange.check_open()
    await exchange.reply({"status": "ready"})


async def load(exchange: Exchange) -> None:
    """The number of requests that run or wait, over all front ends and models; samples of n > 1
    count one by one."""
    loads = [model.engine.load for model in exchange.server.models]
    await exchange.reply({"server_load": sum(one.running + one.waiting for one in loads)})


async def reset_prefix_cache(exchange: Exchange) -> None:
    """Empty the prefix caches of all models."""
    if not exchange.server.settings.prefix_cache_reset:
        raise HttpError(
            403,
            "clients may not reset the prefix cache of this server: it needs the option "
            "--prefix-cache-reset",
            code="not_allowed",
        )
    if exchange.scope["query_string"]:
        raise HttpError(
            400, "the query: there are no parameters; running requests keep what they have computed"
        )
    for model in exchange.server.models:
        await model.engine.reset_prefix_cache()
    await exchange.reply({"status": "ok"})


async def version(exchange: Exchange) -> None:
    """The version, and the components that serve a model, which `?model=` names."""
    exchange.read_query()
    info = exchange.engine.info
    await exchange.reply(
        {
            "version": importlib.metadata.version(DISTRIBUTION),
            "model": info.model,
            "max_model_len": info.intake.max_model_len,
            "parts": dict(info.parts),
            "details": {
                name: value if isinstance(value, str | int | float | bool | None) else str(value)
                for name, value in info.details.items()
            },
        }
    )


async def models(exchange: Exchange) -> None:
    """List the models and adapters, in Anthropic's shape for clients that send its header."""
    served = [
        _described(exchange, model, name)
        for model in exchange.server.models
        for name in (*model.names, *model.engine.adapters)
    ]
    if _speaks_anthropic(exchange):
        query = QueryParams(exchange.scope["query_string"])
        await exchange.reply(anthropic_list(served, query))
    else:
        await exchange.reply(openai_list(served))


async def model(exchange: Exchange) -> None:
    """Describe one model or adapter, as `models` does."""
    shape = anthropic_model if _speaks_anthropic(exchange) else openai_model
    name = exchange.scope["path_params"]["model"]
    found = exchange.server.models.named(name)
    await exchange.reply(shape(_described(exchange, found, name)))


def _speaks_anthropic(exchange: Exchange) -> bool:
    """Return True for a client of Anthropic's API, whose errors then have its shape, too."""
    speaks = any(name == b"anthropic-version" for name, _ in exchange.scope["headers"])
    if speaks:
        exchange.shape = anthropic_shape
    return speaks


def _described(exchange: Exchange, model: Model, name: str) -> ServedModel:
    info = model.engine.info
    adapter = model.engine.adapters.get(name)
    return ServedModel(
        id=name,
        root=info.model if adapter is None else adapter,
        parent=None if adapter is None else model.names[0],
        created=exchange.server.started_at,
        max_model_len=info.intake.max_model_len,
        reads_images=info.intake.media is not None,
    )


def _check_health(exchange: Exchange) -> None:
    try:
        exchange.server.check_health()
    except DovetailError as error:
        raise HttpError(503, str(error), code="engine_dead") from None
    if exchange.scope["app"].state.is_unsupervised:
        raise HttpError(
            503,
            "the server's supervisor hangs: the engine's death would go unnoticed",
            code="supervisor_hangs",
        )


async def openapi(exchange: Exchange) -> None:
    """Describe the available endpoints."""
    settings = exchange.server.settings
    paths = frozenset(
        described_path(route) for route in exchange.scope["app"].routes if isinstance(route, Route)
    )
    version = importlib.metadata.version(DISTRIBUTION)
    await exchange.reply(
        document(
            paths=paths,
            version=version,
            root_path=settings.root_path,
            has_keys=bool(settings.api_keys),
        )
    )


def described_path(route: Route) -> str:
    """Return a route's path as in the OpenAPI document, without converters of parameters."""
    return route.path.replace(":path}", "}")


ROUTES = [
    Route("/health", Endpoint(health), methods=["GET"]),
    Route("/ping", Endpoint(health), methods=["GET"]),
    Route("/reset_prefix_cache", Endpoint(reset_prefix_cache), methods=["POST"]),
    Route("/load", Endpoint(load), methods=["GET"]),
    Route("/ready", Endpoint(ready), methods=["GET"]),
    Route("/openapi.json", Endpoint(openapi), methods=["GET"]),
    Route("/version", Endpoint(version), methods=["GET"]),
    Route("/v1/models", Endpoint(models), methods=["GET"]),
    Route("/v1/models/{model:path}", Endpoint(model), methods=["GET"]),
]
