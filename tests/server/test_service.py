"""Small endpoints about the server: /ping, /load, /tokenizer_info and /reset_prefix_cache; and the
chat template of the whole server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import httpx
import openai
import pytest

from dovetail.errors import ConfigError, EngineDeadError
from dovetail.front.tokenizer import Tokenizer
from dovetail_server.app import create_app
from dovetail_server.engine import Load
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import DEMO, demo_tokenizer, serving

pytestmark = pytest.mark.anyio


async def test_ping_answers_as_health(fake: Callable[..., FakeEngine]) -> None:
    engine = fake()
    async with (
        serving(engine, ServerSettings(api_keys=("one",))) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        well = [await http.get("/ping"), await http.get("/health")]
        engine.failure = EngineDeadError("the engine process ended")
        dead = [await http.get("/ping"), await http.get("/health")]
    assert [answer.status_code for answer in (*well, *dead)] == [200, 200, 503, 503]
    assert well[0].json() == well[1].json()
    assert dead[0].json() == dead[1].json()


async def test_anthropics_clients_get_models_in_their_shape(
    anthropic: ModuleType,
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake()
    engine.adapters = {"one": "/one", "two": "/two"}
    names = [engine.info.model, "one", "two"]
    async with (
        serving(engine) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == names
        assert [model.id async for model in client.models.list(limit=1)] == names, "page by page"
        assert [
            model.id for model in (await client.models.list(limit=1, before_id="two")).data
        ] == ["one"]
        model = await client.models.retrieve("one")
        assert (model.type, model.display_name, model.max_input_tokens) == (
            "model",
            "one",
            engine.info.intake.max_model_len,
        )
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.models.retrieve("three")
        for wrong in (
            {"limit": 0},
            {"limit": "x"},
            {"after_id": "three"},
            {"after_id": "one", "before_id": "two"},
            {"page": 1},
        ):
            with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
                await client.models.list(extra_query=wrong)
    async with (
        serving(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as other,
    ):
        assert [model.id async for model in other.models.list()] == names


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
    assert told["tokenizer_class"] == type(tokenizer.own).__name__
    assert told["eos_token"] == tokenizer.own.eos_token
    assert told["chat_template"] == tokenizer.own.chat_template
    assert {
        int(number): token["content"] for number, token in told["added_tokens_decoder"].items()
    } == {number: token.content for number, token in tokenizer.own.added_tokens_decoder.items()}
    assert str(tokenizer.own.name_or_path) not in answer.text


async def test_load_and_the_tokenizer_need_a_key(fake: Callable[..., FakeEngine]) -> None:
    async with (
        serving(fake(), ServerSettings(api_keys=("one",))) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        for path in ("/load", "/tokenizer_info"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers={"x-api-key": "one"})).status_code == 200


async def test_the_prefix_cache_is_reset_where_clients_may(fake: Callable[..., FakeEngine]) -> None:
    engine = fake()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        refused = await http.post("/reset_prefix_cache")
        assert refused.status_code == 403
        assert "--prefix-cache-reset" in refused.json()["error"]["message"]
    assert engine.resets == 0
    async with (
        serving(engine, ServerSettings(prefix_cache_reset=True, api_keys=("one",))) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.post("/reset_prefix_cache")).status_code == 401
        http.headers["x-api-key"] = "one"
        assert (await http.post("/reset_prefix_cache")).json() == {"status": "ok"}
        assert engine.resets == 1
        assert (
            await http.post("/reset_prefix_cache?reset_running_requests=true")
        ).status_code == 400
        assert (await http.get("/reset_prefix_cache")).status_code == 405
        engine.failure = EngineDeadError("the engine process ended")
        assert (await http.post("/reset_prefix_cache")).status_code == 503
    assert engine.resets == 1


# A chat template for the whole server

OWN = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture
def engine() -> FakeEngine:
    """One with a tokenizer that no other test has."""
    return FakeEngine(Tokenizer.load(DEMO))


@pytest.mark.parametrize("from_file", [False, True])
async def test_a_chat_template_replaces_the_models_own(
    engine: FakeEngine, tmp_path: Path, from_file: bool
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(OWN, encoding="utf-8")
    settings = ServerSettings(chat_template=str(path) if from_file else OWN)
    async with serving(engine, settings) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (
            await http.post(
                "/v1/chat/completions", json={**CHAT, "chat_template": "{{ messages[0].content }}!"}
            )
        ).status_code == 200
        assert (await http.get("/tokenizer_info")).json()["chat_template"] == OWN
    assert [request.prompt for request in engine.submitted] == ["[Hi]", "Hi!"], (
        "requests may still bring theirs"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for %}", "no valid Jinja: line 1"),
        ("{{ messages[0].nothing.at_all }}", "fails on this"),
    ],
)
async def test_a_chat_template_that_cannot_render_ends_the_start(
    engine: FakeEngine, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^chat_template: .*{said}"):
        create_app(engine, ServerSettings(chat_template=text))
    engine.chat.close()


async def test_a_chat_template_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("Hello", encoding="utf-8")
    (tmp_path / "bytes.jinja").write_bytes(b"{{ \xff }}")
    for name in ("missing.jinja", "plain.txt", "bytes.jinja", "", "x" * 10_000):
        with pytest.raises(ValueError, match="chat_template"):
            ServerSettings(chat_template=str(tmp_path / name) if len(name) < 100 else name)
