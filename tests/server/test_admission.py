"""Too many who wait are turned away, with a word when to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from dovetail_server.engine import Load
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio
ASKED = {"prompt": [5] * 10, "max_tokens": 5}


async def test_more_than_may_wait_get_429_until_a_first_token_comes(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(paced=True)
    async with (
        serving(engine, ServerSettings(max_queued_requests=2)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        waiting = [asyncio.create_task(http.post("/v1/completions", json=ASKED)) for _ in range(2)]
        await engine.until_requests(2)
        refused = await http.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        engine.step()
        waiting.append(asyncio.create_task(http.post("/v1/completions", json=ASKED)))
        await engine.until_requests(3)
        for _ in range(5):
            engine.step()
        assert [(await one).status_code for one in waiting] == [200] * 3


async def test_tokens_that_wait_are_counted_but_one_request_always_may(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(paced=True)
    async with (
        serving(engine, ServerSettings(max_queued_tokens=5)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        first = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await engine.until_requests(1)
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
        for _ in range(4):
            engine.step()
        assert (await first).status_code == 200


async def test_a_client_that_goes_waits_no_more(fake: Callable[..., FakeEngine]) -> None:
    engine = fake(paced=True)
    async with (
        serving(engine, ServerSettings(max_queued_requests=1)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        first = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await engine.until_requests(1)
        first.cancel()
        await engine.until_aborted(1)
        second = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await engine.until_requests(1)
        for _ in range(4):
            engine.step()
        assert (await second).status_code == 200


async def test_what_waits_in_the_engine_counts_too(fake: Callable[..., FakeEngine]) -> None:
    engine = fake()
    engine.load = Load(waiting=10)
    async with (
        serving(engine, ServerSettings(max_queued_requests=10)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429


async def test_more_prompts_than_may_ever_wait_are_no_reason_to_try_again(
    fake: Callable[..., FakeEngine],
) -> None:
    async with (
        serving(fake(), ServerSettings(max_queued_requests=2)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.post("/v1/completions", json={**ASKED, "prompt": ["a", "b", "c"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert (
            await http.post("/v1/completions", json={**ASKED, "prompt": ["a", "b"]})
        ).status_code == 200
