"""Routes and middleware that plugins add to the server: see `dovetail.api.routes`."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.errors import ConfigError, DovetailError, PluginError, describe
from dovetail.request.outputs import RequestOutput
from dovetail.request.sampling_params import OutputKind, SamplingParams, changed_unchecked
from dovetail.serving import (
    ChatOptions,
    Prompt,
    Registry,
    TokenizedText,
    Tokenizer,
    Unread,
    content_of,
    cuts,
)
from dovetail_server.errors import HttpError, http_error
from dovetail_server.exchange import Server

logger = logging.getLogger("dovetail.server")


class Context:
    """`RouteContext` of one front end."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def serve(self, server: Server) -> None:
        """Take what the routes use."""
        self._server = server

    @property
    def _served(self) -> Server:
        if self._server is None:
            raise PluginError("the engine isn't there while routes are made: use it in a handler")
        return self._server

    @property
    def models(self) -> tuple[str, ...]:
        return self._served.models

    @property
    def tokenizer(self) -> Tokenizer:
        return self._served.engine.tokenizer

    async def generate(
        self, prompt: Prompt, params: SamplingParams, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        server = self._served
        listener = _Reader()
        [prompt] = await run_in_threadpool(server.engine.source([prompt], cut=cuts(params)).all)
        tokens = len(prompt.token_ids if isinstance(prompt, TokenizedText) else content_of(prompt))
        server.admission.check(1, tokens)
        request_id = f"routes-{uuid.uuid4().hex}"
        done = False
        ticket = server.admission.enter(tokens)
        try:
            async with asyncio.timeout(server.settings.request_timeout_s):
                await server.engine.submit(
                    request_id,
                    prompt,
                    changed_unchecked(params, output_kind=OutputKind.DELTA),
                    listener,
                    **fields,
                )
                while not done:
                    output = await listener.next()
                    ticket.leave(begun=True)
                    done = output.finished
                    yield output
        finally:
            ticket.leave(begun=False)
            if not done:
                server.engine.abort(request_id)

    async def answer(self, prompt: Prompt, params: SamplingParams, **fields: Any) -> RequestOutput:
        whole = Unread(lambda: None, joins=True)
        async with aclosing(self.generate(prompt, params, **fields)) as outputs:
            async for output in outputs:
                whole.put(output)
        return cast(RequestOutput, whole.take()[0])

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> Prompt:
        return await run_in_threadpool(
            self._served.engine.chat.prompt, messages, options or ChatOptions()
        )

    def check_health(self) -> None:
        self._served.check_health()


class _Reader:
    """`Listener` whose outputs wait until they are read."""

    is_plain = False

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._unread = Unread(self._news.set, joins=True)

    def on_text(self, text: str, tokens: int) -> None:
        raise NotImplementedError

    def on_output(self, output: RequestOutput) -> None:
        self._unread.put(output)

    def on_error(self, error: DovetailError) -> None:
        self._unread.end(error)

    async def next(self) -> RequestOutput:
        """Wait for the next output. Raises the error that ended the request."""
        await self._news.wait()
        self._news.clear()
        output, end = self._unread.take()
        if end is not None:
            if output is None:
                raise end
            self._news.set()
        return cast(RequestOutput, output)


@dataclass(frozen=True, slots=True)
class PluginRoutes:
    """The routes and middleware of plugins, each wrapped so that its errors stay its own. Give
    `context` the server before the first request."""

    context: Context = field(default_factory=Context)
    routes: list[BaseRoute] = field(default_factory=list)
    middleware: list[Middleware] = field(default_factory=list)

    @classmethod
    def of(cls, names: Sequence[str], taken: frozenset[str], registry: Registry) -> PluginRoutes:
        """Make the routes of these names. `taken`: paths of the server itself. `registry`: that of
        the plugins that the engine's config admits. Raises `PluginError` that names what fails, and
        `ConfigError` for a path that is taken."""
        added = cls()
        for offer in map(registry.routes_named, names):
            make = offer.load()
            try:
                made = list(make(added.context))
            except Exception as error:
                raise PluginError(
                    f"{offer}: {offer.spec.target} raised {describe(error)}"
                ) from error
            for one in made:
                if isinstance(one, Middleware):
                    added.middleware.append(Middleware(GuardedMiddleware, one, str(offer)))
                elif not isinstance(one, BaseRoute):
                    raise PluginError(
                        f"{offer}: {offer.spec.target} returned {one!r:.200}, expected Starlette's "
                        f"routes and Middleware"
                    )
                elif isinstance(one, Route) and one.path in taken:
                    raise ConfigError(f"{offer}: the server answers {one.path} itself")
                else:
                    added.routes.append(GuardedRoute(one, str(offer)))
        return added


class _Answer:
    """Sends one response, and knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)

    async def fail(self, error: Exception, owner: str, scope: Scope, receive: Receive) -> None:
        """Answer an error that a plugin has raised. Raises it if the response has begun."""
        if not (known := isinstance(error, DovetailError)):
            logger.error(
                "%s raised %s while it answered %s",
                owner,
                describe(error),
                scope.get("path"),
                exc_info=error,
            )
        if self.has_begun or scope["type"] != "http":
            raise error
        told = (
            http_error(error)
            if known
            else HttpError(
                500, f"{owner} failed to answer; the server's log says why", code="internal_error"
            )
        )
        await told.response(scope["path"])(scope, receive, self)


class GuardedRoute(BaseRoute):
    """A plugin's route: its errors are answered, and named in the log."""

    def __init__(self, route: BaseRoute, owner: str) -> None:
        self._route = route
        self._owner = owner

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        try:
            return self._route.matches(scope)
        except Exception as error:
            logger.error(
                "%s raised %s while it was matched", self._owner, describe(error), exc_info=error
            )
            return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        try:
            await self._route.handle(scope, receive, answer)
        except HTTPException:
            raise
        except Exception as error:
            await answer.fail(error, self._owner, scope, receive)


class GuardedMiddleware:
    """A plugin's middleware: its errors are told from those of what it surrounds."""

    def __init__(self, app: ASGIApp, middleware: Middleware, owner: str) -> None:
        self._owner = owner
        try:
            self._app = middleware.cls(_Marking(app), *middleware.args, **middleware.kwargs)
        except Exception as error:
            raise PluginError(f"{owner}: its middleware raised {describe(error)}") from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if getattr(error, "passed_through", False):
                raise
            await answer.fail(error, self._owner, scope, receive)


class _Marking:
    """The app within a middleware; marks its errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            error.passed_through = True  # type: ignore[attr-defined]
            raise
