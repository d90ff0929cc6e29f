"""Texts are tokenized and conversations rendered within limits, in threads that clients share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from dovetail.front.prompts import Prompt
from dovetail_server.app import create_app
from dovetail_server.errors import HttpError
from dovetail_server.preparing import SIZES, FairThreads, Preparing
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import PATIENCE_S, demo_tokenizer, serving

pytestmark = pytest.mark.anyio

LONG = "To be. " * 20_000  # more than the demo model has room for
FITS = "To be. " * 3_000  # more than the smallest thread takes
MESSAGES = [{"role": "user", "content": LONG}]
TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["To be.", LONG]}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG[:60_000]}] * 2}]},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "x", "reasoning_content": LONG},
            ]
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template": "{{ messages[0].content * 60000 }}",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template": "{{ a }}",
            "chat_template_kwargs": {"a": LONG},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"function": {"name": "f", "description": LONG}}],
        },
    ),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x"}], "system": LONG, "max_tokens": 1},
    ),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses", {"input": "x", "instructions": LONG}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": MESSAGES}),
]


class HeldEngine(FakeEngine):
    """Tokenizes nothing until it may."""

    def __init__(self) -> None:
        super().__init__(demo_tokenizer())
        self.begun = 0  # prompts that were begun to be tokenized
        self.may_go_on = threading.Event()

    def tokenized(self, prompt: Prompt) -> Prompt:
        self.begun += 1
        assert self.may_go_on.wait(PATIENCE_S)
        return super().tokenized(prompt)

    async def until_begun(self, number: int) -> None:
        while self.begun < number:
            await asyncio.sleep(0.001)


@pytest.fixture
def held() -> HeldEngine:
    return HeldEngine()


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": FITS, "truncate_prompt_tokens": 10, "max_tokens": 1, **fields}


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
def test_a_prompt_too_long_for_any_endpoint_is_refused_by_the_limit_of_texts(
    server_url: str, path: str, body: dict[str, Any]
) -> None:
    refused = httpx.post(f"{server_url}{path}", json={"model": "demo", **body}, timeout=PATIENCE_S)
    assert refused.status_code == 400
    assert "limits.max_prompt_chars" in refused.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["To be.", LONG], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ],
)
def test_a_text_that_is_truncated_may_be_longer_than_what_fits(
    server_url: str, path: str, body: dict[str, Any]
) -> None:
    asked = {"model": "demo", "truncate_prompt_tokens": 10, **body}
    answer = httpx.post(f"{server_url}{path}", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    short = len(demo_tokenizer().encode("To be.")) if "prompt" in body else 0
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == 10 + short


async def test_prompts_of_one_request_leave_threads_to_others_and_are_dropped_with_their_client(
    held: HeldEngine,
) -> None:
    app, gone = create_app(held), asyncio.Event()
    many = asyncio.create_task(
        ask_until(gone, app, orjson.dumps(text(prompt=[FITS] * 50, client="first")))
    )
    await held.until_begun(1)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        other = asyncio.create_task(http.post("/v1/completions", json=text(client="second")))
        await held.until_begun(2)
        gone.set()
        await many
        held.may_go_on.set()
        assert (await other).status_code == 200
        assert (await http.post("/v1/completions", json=text(client="third"))).status_code == 200
    assert held.begun == 3


async def test_no_more_tokens_are_made_text_than_a_model_has_room_for(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        most = engine.info.intake.max_model_len
        assert (await http.post("/detokenize", json={"tokens": [5] * most})).status_code == 200
        refused = await http.post("/detokenize", json={"tokens": [5] * (most + 1)})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
        assert "max_model_len" in refused.text


async def test_one_client_can_fill_no_more_than_its_share_of_what_is_prepared(
    held: HeldEngine,
) -> None:
    size = len(FITS) + 200  # of a body, and a little more
    async with (
        serving(held, ServerSettings(max_body_bytes=2 * size)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        asked = [
            asyncio.create_task(http.post("/v1/completions", json=text(client="first")))
            for _ in range(3)
        ]
        done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[assignment]
        [refused] = [one.result() for one in done]
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert "max_body_bytes" in refused.text
        assert refused.headers["retry-after"] == "1"
        other = asyncio.create_task(http.post("/v1/completions", json=text(client="second")))
        await held.until_begun(2)
        held.may_go_on.set()
        assert [(await one).status_code for one in [*asked, other]] == [200] * 3


async def test_clients_with_keys_of_their_own_have_shares_of_their_own(held: HeldEngine) -> None:
    size = len(FITS) + 200
    settings = ServerSettings(max_body_bytes=size, api_keys=("a", "b"))
    async with serving(held, settings) as url, httpx.AsyncClient(base_url=url) as http:
        first = asyncio.create_task(
            http.post("/v1/completions", json=text(), headers={"authorization": "Bearer a"})
        )
        await held.until_begun(1)
        assert (
            await http.post("/v1/completions", json=text(), headers={"x-api-key": "a"})
        ).status_code == 429
        second = asyncio.create_task(
            http.post("/v1/completions", json=text(), headers={"x-api-key": "b"})
        )
        await held.until_begun(2)
        held.may_go_on.set()
        assert [(await first).status_code, (await second).status_code] == [200, 200]


async def test_a_text_whose_client_has_gone_is_not_tokenized(held: HeldEngine) -> None:
    app, gone = create_app(held), asyncio.Event()
    asked = [asyncio.create_task(ask_until(gone, app, orjson.dumps(text()))) for _ in range(8)]
    await held.until_begun(len(SIZES) - 1)  # the smallest thread doesn't take them
    gone.set()
    await asyncio.gather(*asked)
    held.may_go_on.set()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        assert (await http.post("/v1/completions", json=text())).status_code == 200
    assert held.begun == len(SIZES)


async def ask_until(gone: asyncio.Event, app: Starlette, body: bytes) -> None:
    """Send a request whose client goes away then."""
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> Message:
        if (message := next(messages, None)) is None:
            await gone.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there to be answered")

    await app(
        {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send
    )


async def test_a_short_request_waits_for_no_long_one(held: HeldEngine) -> None:
    async with serving(held) as url, httpx.AsyncClient(base_url=url) as http:
        asked = [asyncio.create_task(http.post("/v1/completions", json=text())) for _ in range(8)]
        await held.until_begun(len(SIZES) - 1)
        short = await http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
        )
        assert short.status_code == 200
        held.may_go_on.set()
        assert [(await one).status_code for one in asked] == [200] * 8


async def test_a_request_that_was_let_in_before_the_server_drains_is_answered(
    held: HeldEngine,
) -> None:
    app = create_app(held)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=text()))
        await held.until_begun(1)
        app.state.draining = True
        assert (await http.post("/v1/completions", json=text())).status_code == 503
        drained = asyncio.create_task(app.state.server.models.first.admission.wait_until_empty())
        await asyncio.sleep(0)
        assert not drained.done()
        held.may_go_on.set()
        assert (await asked).status_code == 200
        await drained


class Held:
    """Work that ends when it may, and notes in what order it began."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._may_end = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.order.append(name)
            assert self._may_end.wait(PATIENCE_S)
            return name

        return run

    def end(self) -> None:
        self._may_end.set()


async def begun(*coroutines: Any) -> list[asyncio.Task[Any]]:
    """Tasks that have queued their work, in this order."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    await asyncio.sleep(0)
    return tasks


async def test_clients_take_turns_whatever_one_of_them_has_queued() -> None:
    threads, held = FairThreads([inf]), Held()
    names = ["a1", "a2", "a3", "b1", "b2"]
    tasks = await begun(*(threads.run(name[0], 100, held.work(name)) for name in names))
    held.end()
    assert await asyncio.gather(*tasks) == names
    assert held.order == ["a1", "b1", "a2", "b2", "a3"]


async def test_a_client_pays_for_large_work_with_turns() -> None:
    threads, held = FairThreads([inf]), Held()
    tasks = await begun(
        threads.run("a", 300, held.work("large 1")),
        threads.run("a", 300, held.work("large 2")),
        *(threads.run("b", 100, held.work(f"small {number}")) for number in range(4)),
    )
    held.end()
    await asyncio.gather(*tasks)
    assert held.order == ["large 1", "small 0", "small 1", "small 2", "large 2", "small 3"]


async def test_work_that_was_cancelled_before_it_began_is_never_called() -> None:
    threads, held = FairThreads([inf]), Held()
    first, second, third = await begun(*(threads.run(name, 1, held.work(name)) for name in "abc"))
    second.cancel()
    await asyncio.wait([second])
    held.end()
    assert [await first, await third] == ["a", "c"]
    assert held.order == ["a", "c"]


async def test_work_that_was_cancelled_keeps_its_thread_until_it_ends() -> None:
    threads, held = FairThreads([inf]), Held()
    first, second = await begun(*(threads.run(name, 1, held.work(name)) for name in "ab"))
    first.cancel()
    await asyncio.wait([first])
    assert held.order == ["a"]
    held.end()
    assert await second == "b"


async def test_work_never_waits_for_larger_work_only() -> None:
    threads, held = FairThreads([10, 100, inf]), Held()
    large = await begun(*(threads.run("a", 1000, held.work("large")) for _ in range(3)))
    assert await threads.run("a", 100, lambda: "middle") == "middle"
    middle = await begun(*(threads.run("a", 100, held.work("middle")) for _ in range(3)))
    assert await threads.run("a", 10, lambda: "small") == "small"
    held.end()
    await asyncio.gather(*large, *middle)


async def test_an_error_of_the_work_is_its_callers() -> None:
    threads = FairThreads([inf])
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", 1, lambda: 1 // 0)
    assert await threads.run("a", 1, lambda: 1) == 1


async def test_templates_of_requests_hold_up_no_model_s_own() -> None:
    preparing, held = Preparing(ServerSettings()), Held()
    given = await begun(
        *(preparing.run("a", 1, held.work("given"), given_template=True) for _ in range(20))
    )
    assert await preparing.run("a", 10**6, lambda: "own") == "own"
    held.end()
    await asyncio.gather(*given)


async def test_a_client_that_has_nothing_else_under_way_is_let_in_and_so_is_a_small_request() -> (
    None
):
    preparing, large = Preparing(ServerSettings(max_body_bytes=100_000)), 10**9
    for _ in range(2):
        with (
            preparing.admitted("a", large),
            preparing.admitted("a", SIZES[0]),
            preparing.admitted("b", 100_000),
        ):
            for client in ("a", "b"):
                with (
                    pytest.raises(HttpError, match="max_body_bytes"),
                    preparing.admitted(client, SIZES[0] + 1),
                ):
                    pass


async def test_a_thread_that_cannot_be_started_fails_its_task_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    threads = FairThreads((inf,))
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", no_thread)
        for each in await asyncio.gather(
            *(threads.run("client", 1, lambda: 1) for _ in range(3)), return_exceptions=True
        ):
            assert "can't start" in str(each)
    async with asyncio.timeout(PATIENCE_S):
        assert await threads.run("client", 1, lambda: 1) == 1
