"""Streams: everything written arrives, errors within a stream are sent, and clients that leave or
read too slowly leave nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import dovetail_server.streams
from dovetail.errors import EngineDeadError
from dovetail_server.app import create_app
from dovetail_server.settings import ServerSettings
from dovetail_server.streams import Outbox
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio
STREAM = {"prompt": "ROMEO:", "stream": True, "max_tokens": 10_000}
H11 = "uvicorn.protocols.http.h11_impl:H11Protocol"


def texts(body: str) -> str:
    """The text of a stream's events."""
    events = [
        line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: {")
    ]
    return "".join(
        choice["text"] for one in events for choice in json.loads(one).get("choices", ())
    )


async def connected(
    url: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection on which a request was sent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1000)
    data = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    return reader, writer


@pytest.mark.parametrize("http_protocol", [None, H11, "asgi"])
async def test_a_stream_arrives_whole_with_and_without_the_direct_way(
    fake: Callable[..., FakeEngine], http_protocol: str | None
) -> None:
    pieces = ["é", '"', "\n", "</s>", "", "🙂", "\\", "end"]
    engine = fake(*pieces)
    if http_protocol == "asgi":
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(engine)), base_url="http://x"
        ) as http:
            answer = await http.post("/v1/completions", json=STREAM)
    else:
        config: dict[str, Any] = {} if http_protocol is None else {"http": http_protocol}
        async with serving(engine, **config) as url, httpx.AsyncClient(base_url=url) as http:
            answer = await http.post("/v1/completions", json=STREAM)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert texts(answer.text) == "".join(pieces)
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_each_token_arrives_before_the_next_is_made(fake: Callable[..., FakeEngine]) -> None:
    engine = fake("one", "two", "three", paced=True)
    async with (
        serving(engine) as url,
        httpx.AsyncClient(base_url=url) as http,
        asyncio.TaskGroup() as group,
    ):
        seen: asyncio.Queue[str] = asyncio.Queue()

        async def read() -> None:
            async with http.stream("POST", "/v1/completions", json=STREAM) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and (
                        text := json.loads(line[6:])["choices"][0]["text"]
                    ):
                        await seen.put(text)

        group.create_task(read())
        await engine.until_requests(1)
        for piece in ("one", "two", "three"):
            engine.step()
            assert await seen.get() == piece
        engine.step()


async def test_an_error_amidst_a_stream_is_its_last_event(fake: Callable[..., FakeEngine]) -> None:
    engine = fake("one", "two", paced=True)
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=STREAM))
        await engine.until_requests(1)
        engine.step()
        engine.die("a step failed")
        answer = await asking
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "a step failed"
    assert texts(answer.text) == "one"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
async def test_a_client_that_goes_has_its_request_aborted(
    fake: Callable[..., FakeEngine], stream: bool, steps: int
) -> None:
    engine = fake(*["x"] * 100, paced=True)
    async with serving(engine) as url:
        _, writer = await connected(url, {**STREAM, "stream": stream, "n": 2})
        await engine.until_requests(1)
        for _ in range(steps):
            engine.step()
        writer.close()
        await engine.until_aborted(1)
    assert engine.requests == {}


async def test_all_prompts_of_a_client_that_goes_are_aborted(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(*["x"] * 100, paced=True)
    async with serving(engine) as url:
        _, writer = await connected(url, {**STREAM, "prompt": ["a", "b", "c"]})
        await engine.until_requests(3)
        writer.close()
        await engine.until_aborted(3)


async def test_a_cancelled_task_leaves_nothing_in_the_engine(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(*["x"] * 100, paced=True)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(engine)), base_url="http://x"
    ) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=STREAM))
        await engine.until_requests(1)
        engine.step()
        asking.cancel()
        await engine.until_aborted(1)


async def test_a_slow_reader_gets_an_error_and_is_dropped_without_slowing_others(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(*["x" * 1000] * 20_000, paced=True)
    async with (
        serving(engine, ServerSettings(max_backlog_bytes=100_000)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        reader, writer = await connected(url, STREAM)
        await engine.until_requests(1)
        other = asyncio.create_task(http.post("/v1/completions", json={**STREAM, "max_tokens": 20}))
        await engine.until_requests(2)
        while not engine.aborted:
            engine.step()
            await asyncio.sleep(0)
        assert texts((await other).text) == "x" * 20_000
        told = await reader.read(-1)
        assert b"max_backlog_bytes" in told[-1000:]
        writer.close()


async def test_a_request_has_its_time(fake: Callable[..., FakeEngine]) -> None:
    engine = fake("one", paced=True)
    async with (
        serving(engine, ServerSettings(request_timeout_s=0.2)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.post("/v1/completions", json=STREAM)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        asking = asyncio.create_task(http.post("/v1/completions", json=STREAM))
        await engine.until_requests(1)
        engine.step()
        assert "request_timeout_s" in (await asking).text
    assert len(engine.aborted) == 2


async def test_all_waiting_clients_get_the_engines_error(fake: Callable[..., FakeEngine]) -> None:
    engine = fake(paced=True)
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        asking = [
            asyncio.create_task(http.post("/v1/completions", json={**STREAM, "stream": stream}))
            for stream in (True, False)
        ]
        await engine.until_requests(2)
        for request in list(engine.requests.values()):
            request.listener.on_error(EngineDeadError("gone"))
        assert [(await one).status_code for one in asking] == [503, 503]


@pytest.mark.parametrize(("finish", "status"), [("rejected", 503), ("error", 500), ("abort", 503)])
async def test_what_ends_badly_is_an_error(
    fake: Callable[..., FakeEngine], finish: Any, status: int
) -> None:
    async with serving(fake(finish=finish)) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/completions", json={**STREAM, "stream": False})
    assert answer.status_code == status


async def test_a_sample_that_fails_ends_the_others(fake: Callable[..., FakeEngine]) -> None:
    engine = fake("one", paced=True)
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json={**STREAM, "n": 2}))
        await engine.until_requests(1)
        [request] = engine.requests.values()
        request.send("x")
        request.send("", "error", sample=1, stop_reason="the grammar failed")
        assert "the grammar failed" in (await asking).text
        await engine.until_aborted(1)


class Stream:
    """A stream that notes what happens to it."""

    def __init__(self, error: BaseException | None = None) -> None:
        """`error`: what writing it raises."""
        self.error = error
        self.flushed, self.broken = 0, False

    def flush(self) -> None:
        if self.error is not None:
            raise self.error
        self.flushed += 1

    def break_off(self) -> None:
        self.broken = True


async def test_a_stream_that_cant_be_written_ends_alone() -> None:
    outbox, bad, good = (
        Outbox(),
        Stream(RuntimeError("the handler is closed")),
        [Stream() for _ in range(100)],
    )
    for turns in (1, 2):
        for stream in (bad, *good):
            outbox.put(stream)
        while any(stream.flushed < turns for stream in good):
            await asyncio.sleep(0)
    assert bad.broken
    assert not any(stream.broken for stream in good)
    outbox.check_health()


async def test_health_tells_that_streams_are_no_longer_written(
    fake: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dovetail_server.streams, "STALLED_S", 0.0)
    app = create_app(fake())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as http:
        assert (await http.get("/health")).status_code == 200
        # which ends the callback that writes streams
        app.state.server.outbox.put(Stream(asyncio.CancelledError()))
        while (answer := await http.get("/health")).status_code == 200:
            await asyncio.sleep(0)
        assert "streams haven't been written" in answer.text
