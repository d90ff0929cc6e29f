"""All routes of the server, in one list: a file an API, which adds its routes here."""

from __future__ import annotations

from starlette.routing import BaseRoute

from dovetail_server.routes import batches, chat, completions, messages, openapi, responses, service, tokenize
from dovetail_server.settings import ServerSettings


def all_routes(settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes that these settings ask for."""
    return [
        *completions.ROUTES,
        *chat.ROUTES,
        *responses.ROUTES,
        *messages.ROUTES,
        *batches.ROUTES,
        *openapi.ROUTES,
        *tokenize.ROUTES,
        *service.ROUTES,
    ]
