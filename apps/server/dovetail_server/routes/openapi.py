"""`/openapi.json`: what the server's endpoints take and give, for programs that make clients or tests of it."""

from __future__ import annotations

import importlib.metadata

from starlette.routing import Route

from dovetail.errors import DISTRIBUTION
from dovetail_server.exchange import Endpoint, Exchange
from dovetail_server.protocol.openapi import document


async def openapi(exchange: Exchange) -> None:
    """Describe the endpoints that this server has."""
    settings = exchange.server.settings
    paths = {described_path(route) for route in exchange.scope["app"].routes if isinstance(route, Route)}
    version = importlib.metadata.version(DISTRIBUTION)
    await exchange.reply(document(paths=paths, version=version, root_path=settings.root_path, has_keys=bool(settings.api_keys)))


def described_path(route: Route) -> str:
    """Return a route's path as the document has it: without the form of its parameters."""
    return route.path.replace(":path}", "}")


ROUTES = [Route("/openapi.json", Endpoint(openapi), methods=["GET"])]
