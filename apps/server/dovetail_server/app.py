"""`create_app`: the Starlette application of one front end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail_server.admission import HeldBytes, HeldImages
from dovetail_server.batches.store import BatchStore
from dovetail_server.batches.worker import BatchWorker
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.exchange import Server
from dovetail_server.live_page import page_routes
from dovetail_server.middleware import ApiKeys, BrowserGuard, RequestLog
from dovetail_server.models import Model, Models
from dovetail_server.plugin_routes import PluginRoutes
from dovetail_server.preparing import Preparing
from dovetail_server.routes import all_routes
from dovetail_server.scrapes import metrics_route
from dovetail_server.settings import ServerSettings
from dovetail_server.tracing import Tracing


def create_app(
    engine: ServedEngine,
    settings: ServerSettings | None = None,
    *,
    front_end: int = 0,
    on_loopback: bool = False,
) -> Starlette:
    """Return the app that serves an engine. `front_end`: its number among the front ends. See
    `app_of`."""
    settings = settings or ServerSettings()
    model = Model.of(engine, settings, settings.served_model_name, front_end)
    return app_of(Models([model]), settings, on_loopback=on_loopback)


def app_of(models: Models, settings: ServerSettings, *, on_loopback: bool = False) -> Starlette:
    """Return the app that serves models. `on_loopback`: only this machine can reach it. Set
    `app.state.draining` to make /ready answer 503. Raises `ConfigError` for settings that name
    something missing, and `MissingExtraError`."""
    middleware = [Middleware(RequestLog, settings), *middleware_of(settings, on_loopback)]
    metrics = metrics_route(lambda: [model.metrics for model in models])
    routes = [*all_routes(settings), Route("/metrics", metrics, include_in_schema=False)]
    if settings.page:
        routes += page_routes(models)
    added = PluginRoutes.of(
        settings.routes,
        frozenset(route.path for route in routes if isinstance(route, Route)),
        models.first.registry,
    )
    routes += added.routes
    middleware += added.middleware
    tracing = Tracing.to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    batches = None
    if settings.batch_directory is not None:
        batches = BatchStore(
            Path(settings.batch_directory), settings.max_stored_bytes, settings.batch_keep_days
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: http_exception, HttpError: http_exception},
        lifespan=_lifespan,
    )
    bodies = HeldBytes(settings.max_received_bytes)
    images = HeldImages(settings.max_held_image_bytes)
    app.state.server = server = Server(
        models, settings, Preparing(settings), bodies, images, tracing, batches
    )
    added.context.serve(server)
    app.state.draining = app.state.is_unsupervised = False
    app.state.batch_worker = None if batches is None else BatchWorker(app, batches, settings)
    return app


def middleware_of(settings: ServerSettings, on_loopback: bool) -> list[Middleware]:
    """Return the middleware that controls access."""
    middleware = []
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after", "x-dovetail-ignored"],
            )
        )
    middleware.append(
        Middleware(ApiKeys, settings)
        if settings.api_keys
        else Middleware(BrowserGuard, settings, on_loopback)
    )
    return middleware


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    """Run the batch worker; export the remaining spans at shutdown."""
    server: Server = app.state.server
    async with AsyncExitStack() as stack:
        if server.tracing is not None:
            stack.callback(server.tracing.close)
        if (worker := app.state.batch_worker) is not None:
            stack.push_async_callback(_cancel, asyncio.create_task(worker.run()))
        yield


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def http_exception(request: Request, error: Exception) -> Response:
    """Return the response for an error, such as an unknown path or method, in the API's format."""
    path = request.url.path
    if isinstance(error, HttpError):
        return error.response(path)
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = (error.headers if isinstance(error, HTTPException) else None) or {}
    if status == 404:
        message = f"nothing is served at {path[:200]}"
    elif status == 405:
        message = (
            f"{path[:200]} takes {headers.get('Allow', 'another method')}, not {request.method}"
        )
    else:
        message = str(error)
    return HttpError(status, message, headers=headers).response(path)
