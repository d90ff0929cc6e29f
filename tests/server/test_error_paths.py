"""Errors over HTTP name no path of the server, whatever fails and however its message reads."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail.errors import (
    DovetailError,
    EngineDeadError,
    MissingExtraError,
    ModelLoadError,
    PluginError,
    RequestError,
    UnsupportedError,
)
from dovetail.testing.fake_executor import FakeExecutor
from dovetail_server.errors import HttpError, without_paths
from dovetail_server.settings import ServerSettings
from tests.adapters import config_of, weights_of, write_adapter
from tests.front.pooled import GENERATOR, config, install
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.server.fake_engine import FakeEngine
from tests.server.serving import DEMO, serving, serving_in_threads

SECRET = f"{sys.prefix}/lib/site-packages/torch/_C.py"
KINDS: list[Callable[[str], BaseException]] = [
    DovetailError,
    RequestError,
    UnsupportedError,
    ModelLoadError,
    EngineDeadError,
    PluginError,
    MissingExtraError,
    lambda text: HttpError(400, text),
    OSError,
    RuntimeError,
]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "a"}),
]


def secrets(*more: Path | str) -> list[str]:
    """The folders that no error may name."""
    return [
        str(path)
        for path in (
            Path.cwd(),
            Path.home(),
            tempfile.gettempdir(),
            sys.prefix,
            DEMO.parent,
            "site-packages",
            *more,
        )
    ]


def check(response: httpx.Response, *more: Path | str) -> None:
    assert response.status_code >= 400, response.text
    for secret in secrets(*more):
        assert secret not in response.text, response.text
        assert secret not in str(response.headers)


@pytest.mark.anyio
@pytest.mark.parametrize("path", range(len(ASKED)), ids=[path for path, _ in ASKED])
async def test_whatever_is_raised_is_told_without_paths(
    fake: Callable[..., FakeEngine], path: int
) -> None:
    engine = fake()
    url, body = ASKED[path]
    async with serving(engine) as base, httpx.AsyncClient(base_url=base) as http:
        for kind in KINDS:
            for stream in (False, True):
                engine.refusal = kind(
                    f"{SECRET}: it failed; see '{SECRET}' or {DEMO}/config.json:3"
                )  # type: ignore[assignment]
                check(await http.post(url, json={**body, "stream": stream}))
        engine.die(f"OSError: [Errno 2] No such file: '{SECRET}'")
        check(await http.post(url, json=body))
        check(await http.get("/health"))


@pytest.mark.slow("starts processes that read adapters and render templates")
def test_requests_of_each_kind_that_fail_on_a_real_server(tmp_path: Path) -> None:
    model, adapters, batches = tmp_path / "model", tmp_path / "adapters", tmp_path / "batches"
    shutil.copytree(DEMO, model)
    bad = write_adapter(adapters / "bad", config_of(target_modules=["q_proj"]), weights_of({}))
    (bad / "adapter_config.json").write_text("{")
    settings = ServerSettings(
        adapter_directory=str(adapters), batch_directory=str(batches), max_body_bytes=10_000
    )
    served = {"model": str(model), "adapters": {"slots": 1}}
    with (
        serving_in_threads(served, settings) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for path, body in [
            *((path, {**body, "model": "none"}) for path, body in ASKED),
            *((path, {**body, "temperature": "x"}) for path, body in ASKED),
            *((path, {**body, "nothing": 1}) for path, body in ASKED),
            ("/v1/completions", {"prompt": "a" * 9_990}),
            ("/v1/completions", {"prompt": [10**6]}),
            ("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": "start: ("}}),
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "a"}],
                    "chat_template": "{{ 1 // 0 }}{{ messages }}",
                },
            ),
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "a"}],
                    "chat_template": "{% include 'x' %}{{ messages }}",
                },
            ),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ ("},
            ),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "missing"}),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "bad"}),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../model"}),
            ("/v1/unload_lora_adapter", {"lora_name": "x"}),
            (
                "/v1/batches",
                {
                    "input_file_id": "file-1",
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                },
            ),
            ("/classify", {"input": "a"}),
            ("/pooling", {"input": "a", "task": "classify"}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/detokenize", {"tokens": [10**6]}),
            ("/reset_prefix_cache", {}),
            ("/nothing", {}),
            ("/health", {}),
        ]:
            check(http.post(path, json=body), tmp_path)
        for path in (
            "/v1/files/file-1/content",
            "/v1/batches/batch_1",
            "/v1/models/none",
            "/nothing/at/all",
        ):
            check(http.get(path), tmp_path)


def test_what_an_executor_raises_is_told_without_paths(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(site)

    def submit(self: FakeExecutor, batch: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory", SECRET)

    with (
        serving_in_threads(config(GENERATOR)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        monkeypatch.setattr(FakeExecutor, "submit", submit)
        check(http.post("/v1/completions", json={"prompt": "a"}))
        check(http.post("/v1/embeddings", json={"input": "a"}))
        check(http.get("/health"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/me/model: not there", "…/model: not there"),
        ("see '/a/b c/d.json' and \"/a/b\"", "see '…/b c/d.json' and \"…/b\""),
        ("x=/a/b/c,/d/e", "x=…/c,…/e"),
        ("/v1/embeddings makes embeddings; /classify labels", None),
        ("https://example.com/a/b", None),
        ("guided_json: #/properties/a/b: and/or a/b/c", None),
    ],
)
def test_absolute_paths_are_shortened_to_their_last_name(text: str, told: str | None) -> None:
    assert without_paths(text) == (text if told is None else told)
