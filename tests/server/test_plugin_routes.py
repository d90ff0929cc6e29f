"""Routes and middleware that plugins add to the server: guarded, authenticated and limited as its
own."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.routing import Mount, Route
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.errors import ConfigError, PluginError, RequestError
from dovetail.registry.registry import Registry
from dovetail.registry.route_making import SERVER_PATHS, check_paths
from dovetail.registry.selection import PluginSelection
from dovetail_server.app import create_app
from dovetail_server.route_trial import try_routes
from dovetail_server.settings import ServerSettings
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

DECLARED = """
from dovetail.api import RoutesSpec, hookimpl

@hookimpl
def dovetail_routes():
    names = ("haiku", "taken", "below", "second", "broken", "odd", "wrap", "thin", "leaves", "deep", "reads")
    return [RoutesSpec(name=name, target=f"haiku_routes:{name}") for name in names]
"""
ROUTES = """
from dovetail import SamplingParams
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

def haiku(context):
    async def answer(request):
        done = await context.answer((await request.json())["prompt"], SamplingParams(max_tokens=9))
        return JSONResponse({"text": done.outputs[0].text, "reason": done.outputs[0].finish_reason, "models": context.models})

    async def stream(request):
        async def texts():
            async for output in context.generate("Hi", SamplingParams(max_tokens=9)):
                yield output.outputs[0].text + "|"
        return StreamingResponse(texts())

    async def chat(request):
        prompt = await context.chat_prompt([{"role": "user", "content": "Hi"}])
        return JSONResponse(len(prompt.token_ids))

    async def fail(request):
        raise ValueError("a secret")

    async def late(request):
        async def texts():
            yield "begun"
            raise ValueError("a secret")
        return StreamingResponse(texts())

    routes = [Route("/haiku", answer, methods=["POST"]), Route("/stream", stream), Route("/chat", chat), Route("/fail", fail)]
    return [*routes, Mount("/haiku-more", routes=[Route("/late", late)])]

def taken(context):
    return [Route("/health", lambda request: JSONResponse(1))]

def below(context):
    return [Mount("/v1", routes=[Route("/models", lambda request: JSONResponse(1))])]

def second(context):
    return [Mount("/haiku-more", routes=[Route("/late", lambda request: JSONResponse(1))])]

def broken(context):
    return [Route("/x", context.tokenizer)]

def odd(context):
    return ["/x"]

class Wrap:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/stumble":
            raise ValueError("a secret")

        async def signed(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-wrapped", b"yes")]
            await send(message)

        await self.app(scope, receive, signed)

class Thin:
    def __init__(self, app):
        raise ValueError("no")

def leaves(context):
    import os
    os._exit(7)

def deep(context):
    import json

    async def own(request):
        await request.body()
        json.loads("[")

    async def echo(request):
        return JSONResponse(await request.json())

    async def look(request):
        import asyncio
        for _ in range(3):
            task = asyncio.create_task(request.receive())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                return JSONResponse(json.loads(task.result()["body"]))
        return JSONResponse(await request.json())

    return [Route("/own", own, methods=["POST"]), Route("/echo", echo, methods=["POST"]), Route("/look", look, methods=["POST"])]

class Reads:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/read":
            from starlette.requests import Request
            await Request(scope, receive).json()
        await self.app(scope, receive, send)

def reads(context):
    return [Middleware(Reads)]

def wrap(context):
    return [Middleware(Wrap)]

def thin(context):
    return [Middleware(Thin)]
"""


@pytest.fixture
def haiku(site: Site) -> None:  # noqa: F811
    site.install("dovetail-haiku", modules={"haiku_plugin": DECLARED, "haiku_routes": ROUTES})


def offering(*names: str, **others: object) -> ServerSettings:
    return ServerSettings.model_validate({"routes": names, **others})


@pytest.mark.usefixtures("haiku")
async def test_a_plugins_routes_generate_and_stream(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake(), offering("haiku")) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/haiku", json={"prompt": "Hi"})).json() == {
            "text": "Hello, world",
            "reason": "stop",
            "models": ["fake"],
        }
        assert (await http.get("/stream")).text.replace("|", "") == "Hello, world"
        assert (await http.get("/chat")).json() > 1
        assert (await http.get("/haiku")).status_code == 405


@pytest.mark.usefixtures("haiku")
async def test_an_error_is_answered_and_named_and_harms_no_other_route(
    fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake()
    async with (
        serving(engine, offering("dovetail-haiku:haiku")) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.get("/fail")
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/haiku-more/late")
        engine.refusal = RequestError("prompt: it is empty")
        wrong = await http.post("/haiku", json={"prompt": ""})
        engine.refusal = None
        well = await http.post("/haiku", json={"prompt": "Hi"})
    assert (answer.status_code, wrong.status_code, well.status_code) == (500, 400, 200)
    assert "dovetail-haiku" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert "it is empty" in wrong.text
    assert "routes 'haiku' of plugin dovetail-haiku/main" in caplog.text
    assert "a secret" in caplog.text


@pytest.mark.usefixtures("haiku")
@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe{", b'{"a": "\xff"}', b"[" * 200_000], ids=lambda body: body[:4]
)
async def test_a_body_that_is_not_json_is_the_clients_error(
    body: bytes, fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(fake(), offering("deep")) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.post("/echo", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "dovetail-haiku" not in caplog.text


async def in_chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 1000):
        yield b"[" + b" " * 999


@pytest.mark.usefixtures("haiku")
async def test_their_bodies_have_the_servers_limit(
    fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake()
    async with (
        serving(create_app(engine, offering("deep", max_body_bytes=10_000))) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answers = [
            await http.post("/echo", content=b" " * 20_000),
            await http.post("/echo", content=in_chunks(20_000)),
        ]
        assert (await http.post("/echo", content=b" " * 9_000 + b"1")).json() == 1
    assert [answer.status_code for answer in answers] == [413, 413]
    assert all("max_body_bytes" in answer.text for answer in answers)
    assert "dovetail-haiku" not in caplog.text


@pytest.mark.usefixtures("haiku")
@pytest.mark.parametrize("names", [("deep",), ("deep", "reads")])
@pytest.mark.parametrize("end", [b"[", b"\xff", "é".encode() * 2**19 + b"["], ids=len)
async def test_a_large_body_that_is_not_json_is_the_clients_error(
    names: tuple[str, ...], end: bytes, fake: Callable[..., FakeEngine]
) -> None:
    app = create_app(fake(), offering(*names))
    path = "/read" if "reads" in names else "/echo"
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(path, content=b'"' + b" " * 2**20 + end)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert app.state.server.bodies.held == 0


@pytest.mark.usefixtures("haiku")
async def test_a_body_is_received_whole_after_a_look_for_the_client(
    fake: Callable[..., FakeEngine],
) -> None:
    """The look is cancelled while it waits for a message."""
    async with (
        serving(fake(), offering("deep")) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.post("/look", json=[1])).json() == [1]


@pytest.mark.usefixtures("haiku")
async def test_other_json_that_a_handler_cannot_read_is_not_the_clients_error(
    fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(fake(), offering("deep")) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.post("/own", content=b"{")).status_code == 500
        assert (await http.post("/echo", json={"a": [1]})).json() == {"a": [1]}
    assert "routes 'deep' of plugin dovetail-haiku/main 1.0 raised JSONDecodeError" in caplog.text


@pytest.mark.usefixtures("haiku")
async def test_keys_and_limits_hold_for_them(fake: Callable[..., FakeEngine]) -> None:
    engine = fake(paced=True)
    async with (
        serving(engine, offering("haiku", api_keys=("one",), max_queued_requests=1)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.get("/chat")).status_code == 401
        key = {"x-api-key": "one"}
        async with http.stream("GET", "/stream", headers=key):
            busy = await http.post("/haiku", json={"prompt": "Hi"}, headers=key)
            assert (busy.status_code, "max_queued_requests" in busy.text) == (429, True)
    assert engine.aborted, "the client has gone"


@pytest.mark.usefixtures("haiku")
async def test_an_engine_that_dies_meanwhile_is_answered_with_503(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(paced=True)
    async with (
        serving(engine, offering("haiku")) as url,
        httpx.AsyncClient(base_url=url) as http,
        asyncio.TaskGroup() as tasks,
    ):
        asked = tasks.create_task(http.post("/haiku", json={"prompt": "Hi"}))
        await engine.until_requests(1)
        engine.step()
        engine.die()
        assert (await asked).status_code == 503


@pytest.mark.usefixtures("haiku")
async def test_middleware_surrounds_the_servers_routes(fake: Callable[..., FakeEngine]) -> None:
    async with (
        serving(fake(), offering("wrap", "haiku")) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        stumbled, failed, well = (
            await http.get("/stumble"),
            await http.get("/fail"),
            await http.get("/health"),
        )
    assert (stumbled.status_code, "routes 'wrap'" in stumbled.text) == (500, True)
    assert (failed.status_code, "routes 'haiku'" in failed.text) == (500, True)
    assert (well.status_code, well.headers["x-wrapped"]) == (200, "yes")


@pytest.mark.usefixtures("haiku")
@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("taken", ConfigError, "the server answers /health itself"),
        ("below", ConfigError, "the server answers /v1/models itself"),
        (
            "broken",
            PluginError,
            "routes 'broken' of plugin dovetail-haiku/main 1.0: haiku_routes:broken raised",
        ),
        ("odd", PluginError, "expected Starlette's routes"),
        ("haiko", PluginError, "unknown routes 'haiko', did you mean haiku?"),
    ],
)
async def test_what_cannot_be_added_is_refused_by_name(
    name: str, error: type[Exception], told: str, fake: Callable[..., FakeEngine]
) -> None:
    with pytest.raises(error) as raised:
        create_app(fake(), offering(name))
    assert told in str(raised.value)


@pytest.mark.usefixtures("haiku")
def test_the_doctor_refuses_a_path_that_the_server_answers_itself() -> None:
    offer = Registry.discover().routes_named("haiku")
    free = Route("/haiku", print)
    check_paths(offer, [free])
    for route in (
        Route("/v1/models", print, methods=["POST"]),
        Mount("/v1", routes=[Route("/models", print)]),
    ):
        with pytest.raises(PluginError, match=r"^routes 'haiku' .* answers /v1/models itself: "):
            check_paths(offer, [free, route])


@pytest.mark.usefixtures("haiku")
async def test_a_path_of_two_plugins_is_refused(fake: Callable[..., FakeEngine]) -> None:
    with pytest.raises(ConfigError, match=r"routes 'haiku' .* answers /haiku-more/late too"):
        create_app(fake(), offering("haiku", "second"))


@pytest.mark.usefixtures("haiku")
@pytest.mark.parametrize(
    "selection", [{"allowed_plugins": ()}, {"denied_plugins": ("dovetail-haiku",)}]
)
async def test_plugins_that_the_engines_config_does_not_admit_add_none(
    selection: dict[str, Any], fake: Callable[..., FakeEngine]
) -> None:
    engine = fake()
    engine.info = dataclasses.replace(engine.info, **selection)
    with pytest.raises(PluginError, match="unknown routes 'haiku'"):
        create_app(engine, offering("haiku"))


@pytest.mark.usefixtures("haiku")
@pytest.mark.parametrize("flag", ["--route", "--tool-parser"])
def test_serve_names_what_the_config_does_not_admit_before_a_process_starts(flag: str) -> None:
    ran = CliRunner().invoke(
        app, ["serve", "demo", flag, "haiku", "--set", "plugins.deny=[dovetail-haiku]"]
    )
    assert ran.exit_code == 2
    assert "haiku" in ran.output
    assert "denied by plugins.deny" in ran.output


@pytest.mark.slow("starts processes that import the server")
@pytest.mark.usefixtures("haiku")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("taken", "the server answers /health itself"),
        ("broken", "haiku_routes:broken raised PluginError: the engine isn't there"),
        ("odd", "expected Starlette's routes"),
        ("thin", "its middleware raised ValueError: no"),
        ("leaves", "making the routes 'leaves' ended their process with exit code 7"),
    ],
)
def test_serve_refuses_routes_that_cannot_be_made_before_the_engine_starts(
    name: str, told: str
) -> None:
    ran = CliRunner().invoke(app, ["serve", "demo", "--route", name])
    assert ran.exit_code == 2
    assert told in " ".join(ran.output.split())


@pytest.mark.slow("starts a process that imports the server")
@pytest.mark.usefixtures("haiku")
def test_routes_that_can_be_made_pass_their_trial() -> None:
    try_routes(offering("haiku", "wrap"), PluginSelection())


@pytest.mark.slow("starts a process that imports the server")
def test_the_line_of_a_plugin_that_cannot_be_imported_is_told(site: Site) -> None:  # noqa: F811
    site.install(
        "dovetail-haiku",
        modules={"haiku_plugin": DECLARED, "haiku_routes": "import os\nos.no_such_name"},
    )
    with pytest.raises(PluginError) as raised:
        try_routes(offering("haiku"), PluginSelection())
    assert "routes 'haiku' of plugin dovetail-haiku/main 1.0" in str(raised.value)
    assert re.search(r"AttributeError: .* \(.*haiku_routes.py:2\)$", str(raised.value))


@pytest.mark.usefixtures("haiku")
async def test_routes_that_are_not_named_are_not_served(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/chat")).status_code == 404


def test_the_doctor_knows_the_paths_of_the_server(fake: Callable[..., FakeEngine]) -> None:
    app = create_app(fake())
    assert {getattr(route, "path", "") for route in app.routes} == SERVER_PATHS
