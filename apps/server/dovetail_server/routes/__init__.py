"""All routes of the server, one module per API."""

from __future__ import annotations

from starlette.routing import BaseRoute

from dovetail_server.routes import (
    adapters,
    batches,
    chat,
    completions,
    messages,
    pooling,
    responses,
    service,
    tokenize,
)
from dovetail_server.settings import ServerSettings


def all_routes(settings: ServerSettings) -> list[BaseRoute]:
    """Return all routes."""
    return [
        *completions.ROUTES,
        *chat.ROUTES,
        *responses.ROUTES,
        *messages.ROUTES,
        *pooling.ROUTES,
        *batches.ROUTES,
        *tokenize.ROUTES,
        *service.ROUTES,
        *adapters.ROUTES,
    ]
