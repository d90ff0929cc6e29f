"""The dashboard at `/`: its files, and the figures that it polls each second. It shows aggregate
figures only, nothing of individual requests."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail_server.models import Models

FILES = {  # served without an API key, which browsers can't send for them; the figures need one
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Forbids other origins, inline scripts and framing.
GUARD = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes(models: Models) -> list[Route]:
    """Return the page's routes."""
    routes = [Route(path, _file(*file), include_in_schema=False) for path, file in FILES.items()]

    async def live(
        request: Request,
    ) -> Response:  # a coroutine, since the engine's load belongs to the event loop
        model = models.named(request.query_params.get("model"))
        page = {
            "model": model.names[0],
            "models": [one.names[0] for one in models],
            "chat": model.engine.tokenizer.has_chats,
            "decisions": model.engine.decisions(),
        }
        return _json(model.metrics.live() | page)

    return [*routes, Route("/page/live", live, include_in_schema=False)]


def _file(name: str, content_type: str) -> Callable[[Request], Response]:
    content = (resources.files("dovetail_server") / "page" / name).read_bytes()
    return lambda request: Response(content, headers={"content-type": content_type, **GUARD})


def _json(value: object) -> Response:
    return Response(
        orjson.dumps(value),
        headers={"content-type": "application/json", "cache-control": "no-store"},
    )
