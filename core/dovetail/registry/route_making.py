"""`make_routes`: calls the function of a plugin that makes routes, and validates its result. Used
by the server, and by the doctor, which needs no engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.api.targets import package_of
from dovetail.errors import MissingExtraError, PluginError, describe_raised

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.routing import BaseRoute

    from dovetail.api.routes import RouteContext, RouteTokenizer
    from dovetail.registry.resolved import ResolvedRoutes

SERVER_EXTRA = "server"
# what the server answers itself; the doctor, which doesn't import the server, compares with it
SERVER_PATHS = frozenset(
    [
        "/",
        "/page/page.css",
        "/page/page.js",
        "/page/icon.svg",
        "/page/live",
        "/metrics",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
        "/v1/classify",
        "/classify",
        "/pooling",
        "/v1/files",
        "/v1/files/{file}",
        "/v1/files/{file}/content",
        "/v1/batches",
        "/v1/batches/{batch}",
        "/v1/batches/{batch}/cancel",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/ping",
        "/reset_prefix_cache",
        "/load",
        "/ready",
        "/openapi.json",
        "/version",
        "/v1/models",
        "/v1/models/{model:path}",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ]
)


def make_routes(offer: ResolvedRoutes, context: RouteContext) -> list[BaseRoute | Middleware]:
    """Return the routes and middleware that a plugin makes. Raises `PluginError` that names the
    plugin, what failed and the line, and `MissingExtraError` without Starlette."""
    try:
        from starlette.middleware import Middleware
        from starlette.routing import BaseRoute
    except ModuleNotFoundError:
        raise MissingExtraError.naming(SERVER_EXTRA, f"{offer}: routes need starlette") from None
    make = offer.load()
    target = offer.spec.target
    try:
        made = list(make(context))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        told = describe_raised(error, package_of(target))
        raise PluginError(f"{offer}: {target} raised {told}") from error
    for one in made:
        if not isinstance(one, BaseRoute | Middleware):
            raise PluginError(
                f"{offer}: {target} returned {one!r:.200}, expected Starlette's routes and "
                f"Middleware"
            )
    return made


def check_paths(offer: ResolvedRoutes, made: Sequence[BaseRoute | Middleware]) -> None:
    """Raise `PluginError` if one of a plugin's routes has a path that the server answers itself,
    so that the server would refuse it."""
    taken = [path for one in made for _, path in paths_of(one) if path in SERVER_PATHS]
    if taken:
        raise PluginError(f"{offer}: the server answers {taken[0]} itself: choose another path")


def paths_of(made: BaseRoute | Middleware, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the method ("" for any) and the path of a route, and of all routes that a `Mount`
    has."""
    path = before + getattr(made, "path", "")
    below = getattr(made, "routes", None)
    if below:
        for one in below:
            yield from paths_of(one, path)
    elif path:
        for method in sorted(getattr(made, "methods", None) or {""}):
            yield method, path


class NotServing:
    """`RouteContext` while routes are made: every use raises `error()`."""

    @staticmethod
    def error() -> PluginError:
        """Return the error of a function that uses the engine before there is one."""
        return PluginError("the engine isn't there while routes are made: use it in a handler")

    @property
    def models(self) -> tuple[str, ...]:
        raise self.error()

    @property
    def tokenizer(self) -> RouteTokenizer:
        raise self.error()

    def generate(self, prompt: Any, params: Any, **options: Any) -> AsyncGenerator[Any, None]:
        raise self.error()

    async def answer(self, prompt: Any, params: Any, **options: Any) -> Any:
        raise self.error()

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        raise self.error()

    def check_health(self) -> None:
        raise self.error()
