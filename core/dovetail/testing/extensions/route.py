"""`RouteSuite`: checks of a plugin's routes, without an engine: see `FakeRouteContext`.

    class TestHaiku(RouteSuite):
        name = "haiku"
        examples = (RouteExample("POST", "/haiku", {"topic": "rain"}),)

Needs Starlette, the extra `server`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.api.routes import RouteContext
from dovetail.end_reason import EndReason
from dovetail.errors import DovetailError, RequestError, describe
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedRoutes
from dovetail.registry.route_making import NotServing, make_routes
from dovetail.testing.checks import fail, require
from dovetail.testing.extensions.base import ExtensionSuite
from dovetail.testing.fake_routes import FakeRouteContext

if TYPE_CHECKING:
    from starlette.types import ASGIApp

TIME_LIMIT_S = 20.0  # of one request
AT_ONCE = 8  # requests at the same time
NOT_JSON = (b"", b"{", b"\xff", b"[" * 100_000)
REFUSALS = ((EndReason.INVALID, "too long"), (EndReason.QUEUE_FULL, "busy"))
ODD_JSON = (b"{}", b"[]", b"null", b"1", b'"text"')


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteExample:
    """A request that the routes answer. `body`: sent as JSON; None: no body."""

    path: str
    method: str = "POST"
    body: Any = None
    status: int = 200


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """A response: its status, or that of an error that the server would answer."""

    status: int
    body: bytes = b""
    error: Exception | None = None


class RouteSuite(ExtensionSuite):
    """Checks of routes and middleware that a plugin adds to the server."""

    examples: ClassVar[Sequence[RouteExample]] = ()

    @classmethod
    def offers(cls, registry: Registry) -> Sequence[ResolvedRoutes]:
        return registry.routes()

    def test_routes_are_made_without_an_engine_again_and_again(self) -> None:
        """Making routes failed, used the engine, or made others the second time. Each front end
        makes them once, before the engine is there."""
        try:
            first, second = (make_routes(self.offer, NotServing()) for _ in range(2))
        except DovetailError as error:
            fail(str(error), error)
        require(first, f"{self.offer}: it makes no routes")
        paths = [[getattr(one, "path", "") for one in made] for made in (first, second)]
        require(paths[0] == paths[1], f"paths are {paths[0]}, and {paths[1]} the second time")

    def test_examples_are_answered(self) -> None:
        """An example has another status than it says, or the class has no examples."""
        require(self.examples, f"set {type(self).__name__}.examples: requests that are answered")
        for example in self.examples:
            found = self._ask(FakeRouteContext(), example, _encoded(example))
            require(found.status == example.status, _told(example, found))

    def test_an_answer_ends_what_it_has_begun(self) -> None:
        """A request of the engine still runs after the answer. Close generators that aren't read to
        their end, with `contextlib.aclosing`."""
        for example in self.examples:
            context = FakeRouteContext("one two three four")
            left = asyncio.run(self._left_running(context, example))
            require(not left, f"{example.method} {example.path}: {left} requests still run")

    def test_a_body_that_is_not_json_is_refused(self) -> None:
        """A body that isn't JSON was accepted, or ended in an error other than that of
        `request.json()`, which the server answers with 400."""
        self._refuse(NOT_JSON, lambda status: 400 <= status < 500)

    def test_json_of_another_shape_is_no_error_of_the_plugin(self) -> None:
        """JSON without the keys, or of another type than a handler expects, made it raise. Raise
        `RequestError` that names the key, for a status of 400."""
        self._refuse(ODD_JSON, lambda status: status < 500)

    def test_requests_at_the_same_time_do_not_disturb_each_other(self) -> None:
        """Equal requests at the same time were answered differently: handlers share mutable state,
        or block the event loop."""
        for example in self.examples:
            answers = self._ask_often(FakeRouteContext(), example)
            odd = [one for one in answers if one.status != example.status]
            require(not odd, _told(example, odd[0]) if odd else "")

    def test_an_error_of_the_engine_reaches_the_server(self) -> None:
        """The engine refused a request, or was dead, and the answer was a success. Let
        `DovetailError` through; the server knows its status."""
        for example in self.examples:
            before = self._ask(FakeRouteContext(), example, _encoded(example))
            for reason, text in REFUSALS:
                context = FakeRouteContext(refusal=RequestError(text, reason))
                found = self._ask(context, example, _encoded(example))
                uses_it = found.error is context.refusal or found.status != before.status
                same = found.body == before.body
                require(uses_it or same, f"{_told(example, found)}, though the engine refused")

    def _refuse(self, bodies: Sequence[bytes], is_right: Any) -> None:
        for example in self.examples:
            if example.body is None:
                continue
            for body in bodies:
                found = self._ask(FakeRouteContext(), example, body)
                require(is_right(found.status), f"body {body[:20]!r}: {_told(example, found)}")

    def _ask(self, context: RouteContext, example: RouteExample, body: bytes) -> RouteAnswer:
        return asyncio.run(_answer(self._app(context), example, body))

    async def _left_running(self, context: FakeRouteContext, example: RouteExample) -> int:
        """Return how many requests of the engine run after an answer."""
        await _answer(self._app(context), example, _encoded(example))
        for _ in range(AT_ONCE):  # generators that nobody has are closed meanwhile
            await asyncio.sleep(0)
        return context.running

    def _ask_often(self, context: RouteContext, example: RouteExample) -> list[RouteAnswer]:
        app = self._app(context)

        async def all_of_them() -> list[RouteAnswer]:
            asked = (_answer(app, example, _encoded(example)) for _ in range(AT_ONCE))
            return list(await asyncio.gather(*asked))

        return asyncio.run(all_of_them())

    def _app(self, context: RouteContext) -> ASGIApp:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware

        made = make_routes(self.offer, context)
        return Starlette(
            routes=[one for one in made if not isinstance(one, Middleware)],
            middleware=[one for one in made if isinstance(one, Middleware)],
        )


def _encoded(example: RouteExample) -> bytes:
    return b"" if example.body is None else json.dumps(example.body).encode()


async def _answer(app: ASGIApp, example: RouteExample, body: bytes) -> RouteAnswer:
    """Send one request to an app, and read its answer. An error that the server would answer has
    its status."""
    path, _, query = example.path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": example.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    received = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if received:
            return received.pop()
        return await asyncio.Future()  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    error: Exception | None = None
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            await app(scope, receive, send)
    except TimeoutError:
        fail(f"{example.method} {example.path} took longer than {TIME_LIMIT_S:g} s")
    except Exception as raised:
        error = raised
    begun = [message["status"] for message in sent if message["type"] == "http.response.start"]
    status = begun[0] if begun else 500
    if error is not None:
        status = _status_of(error, body)
    return RouteAnswer(status, b"".join(message.get("body", b"") for message in sent), error)


def _status_of(error: Exception, body: bytes) -> int:
    """Return the status with which the server answers an error of a handler."""
    if isinstance(error, RequestError):
        return 429 if error.reason is EndReason.QUEUE_FULL else 400
    if isinstance(error, DovetailError):
        return 503
    is_of_body = isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
    return 400 if is_of_body and body in NOT_JSON else 500


def _told(example: RouteExample, found: RouteAnswer) -> str:
    why = f", it raised {describe(found.error)}" if found.error is not None else ""
    return f"{example.method} {example.path} has the status {found.status}{why}"
