"""Small endpoints about the server: /ping, /load and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from dovetail.errors import EngineDeadError
from dovetail_server.engine import Load
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import demo_tokenizer, serving

pytestmark = pytest.mark.anyio


async def test_ping_answers_as_health(fake: Callable[..., FakeEngine]) -> None:
    engine = fake()
    async with serving(engine, ServerSettings(api_keys=("one",))) as url, httpx.AsyncClient(base_url=url) as http:
        well = [await http.get("/ping"), await http.get("/health")]
        engine.failure = EngineDeadError("the engine process ended")
        dead = [await http.get("/ping"), await http.get("/health")]
    assert [answer.status_code for answer in (*well, *dead)] == [200, 200, 503, 503]
    assert well[0].json() == well[1].json()
    assert dead[0].json() == dead[1].json()


async def test_load_counts_what_runs_and_what_waits(fake: Callable[..., FakeEngine]) -> None:
    engine = fake()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/load")).json() == {"server_load": 0}
        engine.load = Load(running=3, waiting=2)
        assert (await http.get("/load")).json() == {"server_load": 5}
        assert (await http.post("/load")).status_code == 405


async def test_the_tokenizer_is_described_without_files(fake: Callable[..., FakeEngine]) -> None:
    tokenizer = demo_tokenizer()
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.get("/tokenizer_info")
    told = answer.json()
    assert told["tokenizer_class"] == type(tokenizer.transformers).__name__
    assert told["eos_token"] == tokenizer.transformers.eos_token
    assert told["chat_template"] == tokenizer.transformers.chat_template
    assert {int(number): token["content"] for number, token in told["added_tokens_decoder"].items()} == {
        number: token.content for number, token in tokenizer.transformers.added_tokens_decoder.items()
    }
    assert str(tokenizer.transformers.name_or_path) not in answer.text


async def test_load_and_the_tokenizer_need_a_key(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake(), ServerSettings(api_keys=("one",))) as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/load", "/tokenizer_info"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers={"x-api-key": "one"})).status_code == 200
