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
from urllib.parse import unquote

from dovetail.api.routes import RouteContext
from dovetail.end_reason import EndReason
from dovetail.errors import DovetailError, EngineDeadError, RequestError, describe, shown
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedRoutes
from dovetail.registry.route_making import NotServing, make_routes
from dovetail.testing.blocking import heard_blocking_calls
from dovetail.testing.checks import fail, require
from dovetail.testing.extensions.base import ExtensionSuite
from dovetail.testing.extensions.route_requests import (
    RouteExample,
    mark_of,
    variations,
    with_odd_values,
)
from dovetail.testing.fake_routes import FakeRouteContext

if TYPE_CHECKING:
    from starlette.types import ASGIApp

TIME_LIMIT_S = 20.0  # of one request
AT_ONCE = 8  # requests at the same time
NOT_JSON = (b"", b"{", b"\xff", b"[" * 100_000)
# errors of the engine, and the statuses that say so
REFUSALS: tuple[tuple[DovetailError, range], ...] = (
    (RequestError("too long", EndReason.INVALID), range(400, 500)),
    (RequestError("busy", EndReason.QUEUE_FULL), range(429, 504)),
    (EngineDeadError("dead"), range(500, 600)),
)
WORDS = "one two three four"
LONG = "word " * 2_000
OFTEN = 300  # requests, more than any small count of a handler's
REFUSED = 20  # requests, before one that is answered
ODD_JSON = (b"{}", b"[]", b"null", b"1", b'"text"')


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """A response: its status, or that of an error that the server would answer."""

    status: int
    body: bytes = b""
    error: Exception | None = None
    is_streamed: bool = False  # in several pieces


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
            found = self._ask(FakeRouteContext(), example, example.encoded())
            require(found.status == example.status, _told(example, found))

        succeed = [example for example in self.examples if example.status < 400]
        require(succeed, "no example has a status below 400: add a request that succeeds")

    def test_each_route_can_be_reached(self) -> None:
        """A route comes after another of the same plugin that answers its path, so that it's never
        called. Put fixed paths before those with parameters."""
        from starlette.routing import Match, Route

        made = make_routes(self.offer, NotServing())
        routes = [one for one in made if isinstance(one, Route)]
        for index, route in enumerate(routes):
            for method in route.methods or ():
                scope = {"type": "http", "path": route.path, "method": method}
                hiding = [one for one in routes[:index] if one.matches(scope)[0] is Match.FULL]
                require(
                    not hiding,
                    f"{method} {route.path} is answered by {hiding[0].path}" if hiding else "",
                )

    def test_an_answer_ends_what_it_has_begun(self) -> None:
        """A request of the engine still runs after the answer. Close generators that aren't read to
        their end, with `contextlib.aclosing`."""
        for example in self.examples:
            context = FakeRouteContext("one two three four")
            left = asyncio.run(self._left_running(context, example))
            require(not left, f"{example.method} {example.path}: {left} requests still run")

    def test_nothing_runs_on_when_the_client_has_gone(self) -> None:
        """A client left a streamed answer, and its request still runs. Generate in the task that
        sends the answer, or cancel the one that does."""
        for example in self.examples:
            context = FakeRouteContext(LONG)
            left = asyncio.run(self._left_running(context, example, is_leaving=True))
            require(not left, f"{example.method} {example.path}: {left} requests still run")

    def test_a_streamed_answer_has_all_words(self) -> None:
        """An answer of `context.generate` has the last words of the text and lacks the first.
        Outputs have what is new, not all of it."""
        for example in self.examples:
            context = FakeRouteContext(WORDS)
            body = self._ask(context, example, example.encoded()).body
            first, *_, last = (word.encode() for word in WORDS.split())
            require(
                not context.streamed or last not in body or first in body,
                f"{example.method} {example.path}: of {WORDS!r} it sends {body[:100]!r}",
            )

    def test_a_body_that_is_not_json_is_refused(self) -> None:
        """A body that isn't JSON was accepted, or ended in an error other than that of
        `request.json()`, which the server answers with 400."""
        self._refuse(NOT_JSON, lambda status: 400 <= status < 500)

    def test_json_of_another_shape_is_no_error_of_the_plugin(self) -> None:
        """JSON without the keys, or of another type than a handler expects, made it raise. Raise
        `RequestError` that names the key, for a status of 400."""
        self._refuse(ODD_JSON, lambda status: status < 500)

    def test_odd_values_are_no_error_of_the_plugin(self) -> None:
        """A value of another type in the body, a missing key, a text that isn't Unicode, or an odd
        part of the path or the query made a handler raise. Raise `RequestError` that names it, for
        a status of 400."""
        for example in self.examples:
            app = self._app(FakeRouteContext())
            for odd in with_odd_values(example):
                found = asyncio.run(_answer(app, odd, odd.encoded()))
                require(found.status < 500, f"body {odd.body!r:.200}: {_told(odd, found)}")

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
            for refusal, statuses in REFUSALS:
                context = FakeRouteContext(refusal=refusal)
                found = self._ask(context, example, example.encoded())
                if not context.refused:
                    continue  # it doesn't use the engine
                is_told = found.error is None and found.status in statuses
                is_passed_on = isinstance(found.error, DovetailError)
                in_stream = found.is_streamed and str(refusal).encode() in found.body
                require(
                    is_told or is_passed_on or in_stream,
                    f"{_told(example, found)}, though the engine refused: {refusal}",
                )

    def test_after_errors_of_the_engine_all_is_as_before(self) -> None:
        """After requests that the engine refused, an example was answered otherwise, or not at all:
        a lock or a count of running requests wasn't released. Use `with` or `finally`."""
        for example in self.examples:
            context = FakeRouteContext(refusal=REFUSALS[0][0])
            app = self._app(context)
            found = asyncio.run(self._after_refusals(app, context, example))
            require(found.status == example.status, _told(example, found))

    def test_requests_with_other_texts_do_not_mix(self) -> None:
        """Requests at the same time asked the engine for other prompts, or with other parameters,
        than each by itself, or an answer has the text of another request: handlers share a
        variable, such as one of the module, or keep answers by a part of a request."""
        for example in self.examples:
            for several in variations(example, AT_ONCE):
                self._require_unmixed(several)

    def _require_unmixed(self, several: Sequence[RouteExample]) -> None:
        """Require that requests don't mix at the same time, nor one after the other."""
        told = f"{several[0].method} {several[0].path}"
        alone = FakeRouteContext(echoes=True)
        for one in several:
            if self._ask(alone, one, one.encoded()).status != one.status:
                return  # a text that may only be what it is
        together = FakeRouteContext(echoes=True)
        app = self._app(together)
        for _ in range(2):
            together.prompts.clear()
            together.params.clear()
            answers = asyncio.run(self._ask_all(app, several))
            expected, found = (_asked(each) for each in (alone, together))
            require(
                expected == found,
                f"{told}: at the same time the prompts and parameters are {shown(found)}, one "
                f"after the other {shown(expected)}",
            )
            for number, answer in enumerate(answers):
                foreign = [
                    mark_of(other)
                    for other in range(len(several))
                    if other != number and mark_of(other).encode() in answer.body
                ]
                require(
                    not foreign,
                    f"{told}: the answer to the request with {mark_of(number)!r} has {foreign} of "
                    f"others: {shown(answer.body)}",
                )

    def test_handlers_do_not_block_the_event_loop(self) -> None:
        """A handler, or middleware, slept, started a process, used the network or waited for
        input in the event loop, where all other requests wait for it. Use `asyncio.sleep`, an
        asynchronous client, or `run_in_threadpool`."""
        for example in self.examples:
            app = self._app(FakeRouteContext())
            asyncio.run(_answer(app, example, example.encoded()))  # what is imported first
            with heard_blocking_calls() as heard:
                asyncio.run(_answer(app, example, example.encoded()))
            require(
                not heard, f"{example.method} {example.path} calls {', '.join(sorted(set(heard)))}"
            )

    def test_an_error_within_an_answer_is_told(self) -> None:
        """The engine died after the first words, and the answer is a success, as if it were
        whole. Let `DovetailError` through, in a stream too, or write it there."""
        for example in self.examples:
            context = FakeRouteContext(WORDS, refusal=EngineDeadError("dead"), words_before=2)
            found = self._ask(context, example, example.encoded())
            in_stream = found.is_streamed and b"dead" in found.body
            require(
                not context.refused or found.error is not None or found.status >= 400 or in_stream,
                f"{_told(example, found)}, though the engine died meanwhile: {shown(found.body)}",
            )

    def test_answers_stay_as_they_are(self) -> None:
        """After hundreds of requests, or clients that have left, an example was answered
        otherwise: something is used up, or never released."""
        for example in self.examples:
            asyncio.run(self._require_as_first(example))

    async def _require_as_first(self, example: RouteExample) -> None:
        context = FakeRouteContext(LONG)
        app = self._app(context)
        first = await _answer(app, example, example.encoded())
        for _ in range(REFUSED):
            await _answer(app, example, example.encoded(), is_leaving=True)
        context.text = "Hello."
        for _ in range(OFTEN):
            found = await _answer(app, example, example.encoded())
            require(
                found.status == first.status,
                f"{_told(example, found)}; at first it was {first.status}",
            )

    def test_middleware_passes_on_what_is_not_its_own(self) -> None:
        """Middleware failed on the start of the server (`scope["type"]` is "lifespan"), hid an
        error of a route, or read a body that a route then didn't get."""
        from starlette.middleware import Middleware

        made = make_routes(self.offer, FakeRouteContext())
        for one in made:
            if isinstance(one, Middleware):
                asyncio.run(_check_middleware(one))

    def _refuse(self, bodies: Sequence[bytes], is_right: Any) -> None:
        for example in self.examples:
            if example.body is None:
                continue
            for body in bodies:
                found = self._ask(FakeRouteContext(), example, body)
                require(is_right(found.status), f"body {body[:20]!r}: {_told(example, found)}")

    def _ask(self, context: RouteContext, example: RouteExample, body: bytes) -> RouteAnswer:
        return asyncio.run(_answer(self._app(context), example, body))

    async def _after_refusals(
        self, app: ASGIApp, context: FakeRouteContext, example: RouteExample
    ) -> RouteAnswer:
        """Return the answer after some that the engine refused."""
        for _ in range(REFUSED):
            await _answer(app, example, example.encoded())
        context.refusal = None
        return await _answer(app, example, example.encoded())

    async def _ask_all(self, app: ASGIApp, examples: Sequence[RouteExample]) -> list[RouteAnswer]:
        asked = (_answer(app, example, example.encoded()) for example in examples)
        return list(await asyncio.gather(*asked))

    async def _left_running(
        self, context: FakeRouteContext, example: RouteExample, *, is_leaving: bool = False
    ) -> int:
        """Return how many requests of the engine run after an answer, or after its beginning."""
        app = self._app(context)
        await _answer(app, example, example.encoded(), is_leaving=is_leaving)
        for _ in range(AT_ONCE):  # generators that nobody has are closed meanwhile
            await asyncio.sleep(0)
        return context.running

    def _ask_often(self, context: RouteContext, example: RouteExample) -> list[RouteAnswer]:
        return asyncio.run(self._ask_all(self._app(context), [example] * AT_ONCE))

    def _app(self, context: RouteContext) -> ASGIApp:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware

        made = make_routes(self.offer, context)
        return Starlette(
            routes=[one for one in made if not isinstance(one, Middleware)],
            middleware=[one for one in made if isinstance(one, Middleware)],
        )


async def _answer(
    app: ASGIApp, example: RouteExample, body: bytes, *, is_leaving: bool = False
) -> RouteAnswer:
    """Send one request to an app, and read its answer. An error that the server would answer has
    its status. `is_leaving`: the client goes when an answer begins."""
    received = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []
    has_begun = asyncio.Event()

    async def receive() -> Any:
        if received:
            return received.pop()
        await (has_begun.wait() if is_leaving else asyncio.Future())  # the client stays
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):
            has_begun.set()

    error: Exception | None = None
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            await app(_scope_of(example), receive, send)
    except TimeoutError:
        fail(f"{example.method} {example.path} took longer than {TIME_LIMIT_S:g} s")
    except Exception as raised:
        error = raised
    begun = [message["status"] for message in sent if message["type"] == "http.response.start"]
    status = begun[0] if begun else 500
    if error is not None:
        status = _status_of(error, body)
    parts = [message["body"] for message in sent if message.get("body")]
    return RouteAnswer(status, b"".join(parts), error, is_streamed=len(sent) > 2)


def _scope_of(example: RouteExample) -> dict[str, Any]:
    path, _, query = example.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": example.method,
        "scheme": "http",
        "path": unquote(path, errors="replace"),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }


async def _check_middleware(middleware: Any) -> None:
    """Fail if middleware doesn't pass on the start of a server, a body, or an error."""
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])
        if scope["type"] == "http":
            seen.append((await receive()).get("body"))
            raise InnerError

    async def silent(*_: Any) -> Any:
        return {"type": "lifespan.startup"}

    app = middleware.cls(inner, *middleware.args, **middleware.kwargs)
    named = f"middleware {getattr(middleware.cls, '__name__', middleware.cls)}"
    try:
        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, silent, silent)
    except Exception as error:
        fail(f"{named}, as a server starts, raised {describe(error)}", error)
    require("lifespan" in seen, f"{named} doesn't pass on the start of the server")
    found = await _answer(app, RouteExample(path="/of-another-plugin"), b"unchanged")
    if "http" not in seen:
        return  # it may answer itself
    require(b"unchanged" in seen, f"{named} took the body of a request that it passed on")
    require(found.status >= 400, f"{named} hid an error of a route: {found.status}")


class InnerError(Exception):
    """Raised within middleware."""


def _asked(context: FakeRouteContext) -> list[str]:
    """Return the prompts and parameters of a context's requests, in an order of their own."""
    pairs = zip(context.prompts, context.params, strict=True)
    return sorted(f"{getattr(prompt, 'text', prompt)} {params}" for prompt, params in pairs)


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
