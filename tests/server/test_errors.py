"""Errors in a request have the API's shape and name the parameter; and authentication."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.end_reason import EndReason
from dovetail.errors import EngineDeadError, RequestError
from dovetail.request.outputs import CompletionOutput
from dovetail_server.app import create_app
from dovetail_server.errors import STATUSES, error_of_end, http_error
from dovetail_server.protocol.chat import ChatRequest
from dovetail_server.protocol.completions import CompletionRequest
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tests.support import examples

PROMPT = {"prompt": "ROMEO:"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "finite number >= 0"),
    ({"temperature": "hot"}, "temperature", "expected `float | null`, got `str`"),
    ({"top_p": 2}, "top_p", "<= 1"),
    ({"n": 0}, "n", "integer >= 1"),
    ({"n": 2_000}, "n", "limits.max_n"),
    ({"n": 100_000}, "n", "limits.max_samples"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": ["x"] * 300}, "stop", "limits.max_stop_strings"),
    ({"logit_bias": {"5": 1000}}, "logit_bias[5]", "<= 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "a key"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"max_tokens": 0}, "max_tokens", "0 is only for echo"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "max_tokens (0)"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", ">= 1"),
    ({"logprobs": 1000}, "logprobs", "limits.max_logprobs"),
    ({"min_tokens": 20}, "min_tokens", "at most max_tokens"),
    ({"tempreature": 1}, "tempreature", "did you mean temperature"),
    ({"suffix": "end"}, "suffix", "fill gaps"),
    ({"best_of": 3}, "best_of", "must equal n"),
    ({"use_beam_search": True}, "use_beam_search", "LLM.beam_search(prompts, BeamSearchParams("),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": ["a", 1]}, "prompt", "one kind"),
    ({"prompt": [10**7]}, "prompt", ""),
    ({"prompt": "x" * 100_000}, "prompt", ""),
    ({"prompt": [5] * 2000}, "prompt", "1024"),
    ({"prompt": 5}, "prompt", "expected"),
    ({"prompt": None}, "prompt", "expected"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"deadline_s": 1e300}, "deadline_s", ""),
    ({"ttft_deadline_s": 1e300}, "ttft_deadline_s", ""),
    ({"tbt_s": 0}, "tbt_s", "above 0"),
    ({"cache_salt": "x" * 1000}, "cache_salt", "limits.max_name_chars"),
    ({"client": "x" * 1000}, "client", "limits.max_name_chars"),
]


@pytest.mark.parametrize(
    ("wrong", "param", "reason"),
    WRONG,
    ids=[f"{param}-{index}" for index, (_, param, _) in enumerate(WRONG)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_parameter_is_named(
    server_url: str, wrong: dict[str, Any], param: str, reason: str, stream: bool
) -> None:
    if stream and "stream_options" in wrong and "stream" not in wrong:
        return
    answer = httpx.post(
        f"{server_url}/v1/completions",
        json={**PROMPT, **({"stream": True} if stream else {}), **wrong},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert reason in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": "x", "n": 1e999}',
    ],
)
def test_a_body_that_is_no_request_is_refused(server_url: str, body: bytes) -> None:
    answer = httpx.post(f"{server_url}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_an_unknown_model_path_or_method_is_reported_in_the_same_shape(server_url: str) -> None:
    answers = [
        httpx.post(f"{server_url}/v1/completions", json={**PROMPT, "model": "gpt-9"}),
        httpx.get(f"{server_url}/v1/nothing"),
        httpx.get(f"{server_url}/v1/completions"),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 405]
    assert [answer.json()["error"]["code"] for answer in answers] == ["model_not_found", None, None]


def test_a_sane_request_id_is_echoed_and_another_replaced(server_url: str) -> None:
    assert (
        httpx.get(f"{server_url}/health", headers={"X-Request-Id": "mine-1"}).headers[
            "x-request-id"
        ]
        == "mine-1"
    )
    assert (
        httpx.get(f"{server_url}/health", headers={"X-Request-Id": 'a"b'}).headers["x-request-id"]
        != 'a"b'
    )
    assert len(httpx.get(f"{server_url}/health").headers["x-request-id"]) == 32


def test_version_tells_model_and_parts(server_url: str) -> None:
    told = httpx.get(f"{server_url}/version").json()
    assert (Path(told["model"]).name, told["max_model_len"]) == ("demo", 1024)
    assert {"version", "parts", "details"} <= set(told)


@pytest.mark.anyio
async def test_keys_are_asked_for_except_where_processes_are_watched(
    fake: Callable[..., FakeEngine],
) -> None:
    async with (
        serving(fake(), ServerSettings(api_keys=("one", "two"))) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        refused = [
            await http.get("/v1/models"),
            await http.get("/v1/models", headers={"Authorization": "Bearer three"}),
        ]
        assert [answer.status_code for answer in refused] == [401, 401]
        assert refused[0].json()["error"]["code"] == "invalid_api_key"
        anthropic = await http.post("/v1/messages")
        assert anthropic.json()["type"] == "error"
        let_in = [
            {"Authorization": "Bearer one"},
            {"Authorization": "bearer two"},
            {"x-api-key": "two"},
        ]
        assert [
            (await http.get("/v1/models", headers=headers)).status_code for headers in let_in
        ] == [200] * 3
        assert (
            (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200
        )


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_API_KEYS", "a, b")
    assert ServerSettings().api_keys == ("a", "b")
    assert "'a'" not in repr(ServerSettings())
    monkeypatch.setenv("DOVETAIL_API_KEYS", "")
    assert ServerSettings().api_keys == ()


@pytest.mark.parametrize("keys", [",", " ", ", ,"])
def test_an_environment_without_any_key_opens_no_server(
    monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.setenv("DOVETAIL_API_KEYS", keys)
    with pytest.raises(ValidationError, match=r"DOVETAIL_API_KEYS\): a key can't be empty"):
        ServerSettings()


@pytest.mark.anyio
async def test_a_dead_engine_is_told_by_health_and_to_who_asks(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        engine.failure = EngineDeadError("the engine process ended")
        answers = [
            await http.get("/health"),
            await http.get("/ready"),
            await http.post("/v1/completions", json=PROMPT),
        ]
    assert [answer.status_code for answer in answers] == [503] * 3
    assert all(
        "the engine process ended" in answer.json()["error"]["message"] for answer in answers
    )


@pytest.mark.anyio
async def test_a_server_that_drains_takes_nothing_new(fake: Callable[..., FakeEngine]) -> None:
    app = create_app(fake())
    app.state.draining = True
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server"
    ) as http:
        answers = [
            await http.get("/ready"),
            await http.post("/v1/completions", json=PROMPT),
            await http.get("/health"),
        ]
    assert [answer.status_code for answer in answers] == [503, 503, 200]


@pytest.mark.anyio
async def test_an_early_refusal_of_a_stream_has_its_status(fake: Callable[..., FakeEngine]) -> None:
    engine = fake(paced=True)
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as http:
        engine.refusal = RequestError("n must be at most 3")
        answer = await http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


@pytest.mark.anyio
async def test_bodies_have_a_limit(fake: Callable[..., FakeEngine]) -> None:
    async def chunks() -> Any:
        for _ in range(100):
            yield b" " * 100

    async with (
        serving(fake(), ServerSettings(max_body_bytes=1000)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answers = [
            await http.post("/v1/completions", content=b" " * 2000),
            await http.post("/v1/completions", content=chunks()),
        ]
    assert [answer.status_code for answer in answers] == [413, 413]
    assert "max_body_bytes" in answers[0].json()["error"]["message"]


@contextmanager
def no_file_descriptors() -> Iterator[None]:
    """This process can't open one file more."""
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard)
        )
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.anyio
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize(
    ("path", "request_of"),
    [
        (
            "/v1/chat/completions",
            {
                "json": {
                    "messages": [{"role": "user", "content": "a"}],
                    "chat_template": "{{ messages[0].content }}",
                }
            },
        ),
        (
            "/tokenize",
            {
                "json": {
                    "messages": [{"role": "user", "content": "a"}],
                    "chat_template": "{{ messages[0].content }}",
                }
            },
        ),
        (
            "/v1/files",
            {"data": {"purpose": "batch"}, "files": {"file": ("a", b"{}", "text/plain")}},
        ),
    ],
)
@pytest.mark.usefixtures("own_template_processes")
async def test_without_file_descriptors_a_request_may_come_again(
    fake: Callable[..., FakeEngine], path: str, request_of: dict[str, Any], tmp_path: Path
) -> None:
    engine = fake()
    app = create_app(engine, ServerSettings(batch_directory=str(tmp_path)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server"
    ) as http:
        with no_file_descriptors():
            answer = await http.post(path, **request_of)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "Too many open files" in answer.json()["error"]["message"]
        assert (await http.post(path, **request_of)).status_code == 200
    engine.chat.close()


@pytest.mark.anyio
async def test_pages_of_allowed_origins_may_call(fake: Callable[..., FakeEngine]) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with (
        serving(
            fake(), ServerSettings(cors_origins=("https://a.example",), api_keys=("x",))
        ) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.options("/v1/completions", headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (
        200,
        "https://a.example",
    )


@pytest.mark.anyio
async def test_each_request_has_one_log_line_without_its_prompt(
    fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dovetail.server")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:
        await http.post(
            "/v1/completions",
            json={"prompt": "a secret"},
            headers={"X-Request-Id": "me", "traceparent": trace},
        )
        await http.post("/v1/completions", json={"prompt": 5}, headers={"traceparent": "00-0-0-01"})
    lines = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "dovetail.server"
    ]
    assert [line["status"] for line in lines] == [200, 400]
    assert "secret" not in caplog.text
    assert lines[0]["request_id"] == "me"
    assert lines[0]["completion_tokens"] == 4
    assert lines[0]["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert "trace_id" not in lines[1]


def test_every_reason_but_those_of_an_answer_has_a_status() -> None:
    answers = {EndReason.STOP, EndReason.LENGTH, EndReason.KV_CAPACITY}
    assert set(STATUSES) == set(EndReason) - answers


@pytest.mark.parametrize("reason", EndReason)
@pytest.mark.parametrize("text", ["structured: a", "lora_request 'a': b", "the prompt: a", ""])
def test_how_an_end_is_answered_depends_on_its_reason_alone(reason: EndReason, text: str) -> None:
    finish = reason.finish_reason
    end = CompletionOutput(0, "", (), finish_reason=finish, stop_reason=text, end_reason=reason)
    error = error_of_end(end)
    assert (error is None) == (reason not in STATUSES)
    if error is not None:
        told = http_error(error)
        assert (told.status, told.code) == STATUSES[reason]


def values() -> st.SearchStrategy[Any]:
    """Values that fit a parameter now and then."""
    plain = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=5)
    )
    return st.recursive(
        plain,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=5,
    )


@pytest.mark.parametrize(
    ("path", "kind"), [("completions", CompletionRequest), ("chat/completions", ChatRequest)]
)
def test_no_body_is_a_fault_of_the_server(
    fake: Callable[..., FakeEngine], path: str, kind: Any
) -> None:
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template": "{{ messages[0].content }}",
    }
    needed = {"prompt": "x"} if kind is CompletionRequest else chat
    names = [name for name in kind.__struct_encode_fields__ if name != "chat_template"]

    async def statuses(bodies: list[dict[str, Any]]) -> list[int]:
        engine = fake("x")
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(engine)), base_url="http://x"
        ) as http:
            answers = [
                await http.post(f"/v1/{path}", content=json.dumps({**needed, **body}))
                for body in bodies
            ]
        engine.chat.close()
        assert engine.requests == {}
        return [answer.status_code for answer in answers]

    @examples(3, 200)
    @given(
        st.lists(
            st.sampled_from(names).flatmap(lambda name: st.fixed_dictionaries({name: values()})),
            min_size=30,
            max_size=60,
        )
    )
    def check(bodies: list[dict[str, Any]]) -> None:
        assert set(asyncio.run(statuses(bodies))) <= {200, 400, 404}

    check()
