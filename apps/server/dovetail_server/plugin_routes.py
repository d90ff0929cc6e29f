"""Routes and middleware that plugins add to the server: see `dovetail.api.routes`."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Unpack, cast

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.api.routes import ChatPromptOptions, RequestOptions, RoutePrompt
from dovetail.errors import ConfigError, DovetailError, PluginError, describe
from dovetail.request.outputs import RequestOutput
from dovetail.request.sampling_params import OutputKind, SamplingParams, changed_unchecked
from dovetail.serving import (
    ChatOptions,
    JsonBounds,
    NotServing,
    Prompt,
    Registry,
    Tokenizer,
    Unread,
    cuts,
    excess_of,
    make_routes,
    paths_of,
)
from dovetail_server.admission import BoundedReceive, HeldBody, body_too_large
from dovetail_server.errors import HttpError, http_error
from dovetail_server.exchange import Server, tokens_of
from dovetail_server.models import Model

logger = logging.getLogger("dovetail.server")

MOST_KEPT = 1 << 20  # bytes of a body that are kept while a plugin's middleware answers it
DEEP = JsonBounds(parts=MOST_KEPT, depth=500)  # deeper JSON may exceed Python's recursion limit


class Context:
    """`RouteContext` of one front end. Routes use its first model."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def serve(self, server: Server) -> None:
        """Take what the routes use."""
        self._server = server

    @property
    def _served(self) -> Server:
        if self._server is None:
            raise NotServing.error()
        return self._server

    @property
    def _model(self) -> Model:
        return self._served.models.first

    @property
    def models(self) -> tuple[str, ...]:
        return self._model.names

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.engine.tokenizer

    async def generate(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        timeout_s = self._served.settings.request_timeout_s
        model = self._model
        listener = _Reader()
        source = model.engine.source([cast(Prompt, prompt)], cut=cuts(params))
        [made] = await run_in_threadpool(source.all)
        tokens = tokens_of(made)
        model.admission.check(1, tokens)
        request_id = f"routes-{uuid.uuid4().hex}"
        done = False
        ticket = model.admission.enter(tokens)
        try:
            async with asyncio.timeout(timeout_s):
                await model.engine.submit(
                    request_id,
                    made,
                    changed_unchecked(params, output_kind=OutputKind.DELTA),
                    listener,
                    **options,
                )
                while not done:
                    output = await listener.next()
                    ticket.leave(begun=True)
                    done = output.finished
                    yield output
        finally:
            ticket.leave(begun=False)
            if not done:
                model.engine.abort(request_id)

    async def answer(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        whole = Unread(lambda: None, joins=True)
        async with aclosing(self.generate(prompt, params, **options)) as outputs:
            async for output in outputs:
                whole.put(output)
        return cast(RequestOutput, whole.take()[0])

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatPromptOptions]
    ) -> RoutePrompt:
        prompt = self._model.engine.chat.prompt
        made = await run_in_threadpool(prompt, messages, ChatOptions(**options))
        return cast(RoutePrompt, made)  # a conversation has a text

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
        `ConfigError` for a path that the server or another plugin has."""
        added = cls()
        owners = dict.fromkeys([("", path) for path in taken], "the server")
        for offer in map(registry.routes_named, names):
            for one in make_routes(offer, added.context):
                if isinstance(one, Middleware):
                    added.middleware.append(Middleware(GuardedMiddleware, one, str(offer)))
                else:
                    _claim(one, str(offer), owners)
                    added.routes.append(GuardedRoute(one, str(offer)))
        return added


def _claim(route: BaseRoute, owner: str, owners: dict[tuple[str, str], str]) -> None:
    """Enter a plugin's route, and those in a `Mount`, among the owners of methods ("" for any) and
    paths. Raises `ConfigError` for what another owner has."""
    for method, path in paths_of(route):
        other = owners.get(("", path)) or owners.setdefault((method, path), owner)
        if other == "the server":
            raise ConfigError(f"{owner}: the server answers {path} itself")
        if other != owner:
            raise ConfigError(f"{owner}: {other} answers {path} too, and comes first")


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


class _Body:
    """Receives one request, and keeps its body's beginning, to tell whether an error is its
    fault."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._left = most
        self._parts: list[bytes] = []
        self._refused: HttpError | None = None

    async def __call__(self) -> Message:
        try:
            message = await self._receive()
        except HttpError as error:
            self._refused = error
            raise
        part = message.get("body", b"")[: self._left]
        if part:
            self._left -= len(part)
            self._parts.append(part)
        return message

    def fault(self, error: Exception) -> HttpError | None:
        """Return the error for the client if this body was refused, or if a handler's error says
        that it isn't JSON, as `request.json()` raises it; None for any other error."""
        if self._refused is not None:
            return self._refused
        body = b"".join(self._parts)
        is_cut = self._left == 0
        if isinstance(error, json.JSONDecodeError):
            is_ours = _is_read_from(error.doc, body, is_cut)
        elif isinstance(error, UnicodeDecodeError):
            read = bytes(error.object)
            is_ours = read.startswith(body) if is_cut else read == body
        else:
            is_ours = isinstance(error, RecursionError) and excess_of(body, DEEP) is not None
        if not is_ours:
            return None
        what = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        return HttpError(400, f"the body isn't valid JSON: {what}", code="invalid_json")


def _is_read_from(text: str, body: bytes, is_cut: bool) -> bool:
    """Return True if a text is what `json.loads` decodes of a body, or of one that begins so."""
    if not is_cut:
        return text == body.decode(json.detect_encoding(body), "surrogatepass")
    beginning = body.decode(json.detect_encoding(body), "ignore")
    return text.startswith(beginning[:-1])  # its last letter may be cut


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
        if scope["type"] != "http":
            await self._answer(scope, receive, send, MOST_KEPT)
            return
        server: Server = scope["app"].state.server
        most = server.settings.max_body_bytes
        held = HeldBody(server.bodies)
        bounded = BoundedReceive(
            scope,
            receive,
            most,
            body_too_large(most),
            server.settings.body_timeout_s,
            held.grow_to,
        )
        try:
            await self._answer(scope, bounded, send, most)
        finally:
            held.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, most: int) -> None:
        answer = _Answer(send)
        body = _Body(receive, most)
        try:
            await self._route.handle(scope, body, answer)
        except HTTPException:
            raise
        except Exception as error:
            await answer.fail(body.fault(error) or error, self._owner, scope, receive)


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
        body = _Body(receive, MOST_KEPT)
        try:
            await self._app(scope, body, answer)
        except Exception as error:
            if getattr(error, "passed_through", False):
                raise
            await answer.fail(body.fault(error) or error, self._owner, scope, receive)


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
