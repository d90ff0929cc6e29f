"""LoRA adapters as models of a server: in requests and /v1/models, loaded and unloaded while it
runs, over both kinds of line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dovetail import LLM, LoRARequest, SamplingParams
from dovetail.errors import RequestError
from dovetail.front.lora_files import WEIGHTS
from dovetail_server.settings import ServerSettings
from tests.adapters import config_of, weights_of, write_adapter
from tests.server.engines import Collector, Link, served
from tests.server.serving import serving_in_threads

PROMPT = "ROMEO: But soft"
MODULES = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(2)}
CONFIG = {"model": "demo", "max_num_seqs": 8, "adapters": {"slots": 2}}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def write(folder: Path, seed: int = 0) -> Path:
    return write_adapter(
        folder, config_of(target_modules=["q_proj"]), weights_of(MODULES, seed=seed)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write(folder / name, seed)
    bad = write(folder / "bad")
    (bad / WEIGHTS).write_bytes((bad / WEIGHTS).read_bytes()[:-3])
    write(folder.parent / "outside")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """What each model answers, by the library."""
    with LLM(**CONFIG) as llm:
        each = {
            "demo": None,
            **{name: LoRARequest(name, 1, str(folder / name)) for name in ("one", "two")},
        }
        return {
            name: llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=one)[0].outputs[0].text
            for name, one in each.items()
        }


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[openai.OpenAI]:
    settings = ServerSettings(adapter_directory=str(folder))
    with (
        serving_in_threads(CONFIG, settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def answer(api: openai.OpenAI, model: str) -> str:
    return (
        api.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=8)
        .choices[0]
        .text
    )


def post(api: openai.OpenAI, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{api.base_url}{path}", json=body, timeout=60)


def names(api: openai.OpenAI) -> list[str]:
    return [model.id for model in api.models.list()]


@pytest.mark.slow("answers many requests")
def test_adapters_are_loaded_used_and_unloaded(
    api: openai.OpenAI, folder: Path, expected: dict[str, str]
) -> None:
    for name in ("one", "two"):
        assert post(api, "load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
    assert names(api) == ["demo", "one", "two"]
    assert {name: answer(api, name) for name in expected} == expected
    assert len({*expected.values()}) == 3
    assert api.models.retrieve("one").model_dump()["root"] == str(folder / "one")
    again = post(api, "load_lora_adapter", lora_name="one", lora_path="two")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
    assert (
        post(
            api, "load_lora_adapter", lora_name="one", lora_path="two", load_inplace=True
        ).status_code
        == 200
    )
    assert answer(api, "one") == expected["two"]
    metrics = httpx.get(str(api.base_url).replace("/v1/", "/metrics")).text
    assert re.search(
        r'^dovetail_adapter_requests_total\{.*adapter="one".*\} 2\.0$', metrics, re.MULTILINE
    )
    for name in ("one", "two"):
        assert post(api, "unload_lora_adapter", lora_name=name).status_code == 200
    assert names(api) == ["demo"]
    with pytest.raises(openai.NotFoundError, match="isn't served here; available: demo"):
        answer(api, "one")
    assert post(api, "unload_lora_adapter", lora_name="one").status_code == 404


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"lora_name": "x", "lora_path": "bad"}, "isn't a whole safetensors file"),
        ({"lora_name": "x", "lora_path": "none"}, "is no directory here"),
        ({"lora_name": "x", "lora_path": "../outside"}, "isn't below the folder of adapters"),
        ({"lora_name": "demo", "lora_path": "one"}, "the model's own name"),
        ({"lora_name": "", "lora_path": "one"}, "lora_name"),
        (
            {"lora_name": "x" * 513, "lora_path": "one"},
            "lora_name: its characters must be at most 512",
        ),
        pytest.param(
            {"lora_name": "x", "lora_path": "a/" * 2049},
            "lora_path: expected `str` of length <= 4096",
            id="a path that no system opens",
        ),
        ({"lora_path": "one"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "one", "dtype": "float16"}, "dtype"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    body: dict[str, Any], says: str, api: openai.OpenAI
) -> None:
    refused = post(api, "load_lora_adapter", **body)
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    assert names(api) == ["demo"]


def test_loading_is_off_unless_a_folder_is_given(server_url: str) -> None:
    for path, body in (
        ("load", {"lora_name": "a", "lora_path": "a"}),
        ("unload", {"lora_name": "a"}),
    ):
        refused = httpx.post(f"{server_url}/v1/{path}_lora_adapter", json=body)
        assert refused.status_code == 403
        assert "--adapter-directory" in refused.json()["error"]["message"]


@pytest.mark.parametrize("wrong", ["a", "=b", "a="])
def test_a_module_is_a_name_and_a_path(wrong: str) -> None:
    with pytest.raises(ValueError, match="NAME=PATH"):
        ServerSettings(lora_modules=(wrong,))


@pytest.mark.slow("makes an engine with an adapter")
@pytest.mark.parametrize("link", ["thread", "zmq"])
def test_an_adapter_that_was_damaged_since_fails_its_own_requests(
    link: Link, tmp_path: Path
) -> None:
    async def main() -> None:
        async with served(link, tmp_path, model="demo", adapters={}) as there:
            engine, good = there.engine, write(tmp_path / "a")
            await engine.load_adapter("a", str(good), str(tmp_path))
            assert engine.adapters == {"a": str(good)}
            (good / WEIGHTS).write_bytes(b"junk")
            ends = []
            for name, one in (("bad", LoRARequest("a", 1, str(good))), ("base", None)):
                listener = Collector()
                await engine.submit(name, PROMPT, GREEDY, listener, lora_request=one)
                await listener.over.wait()
                ends.append(listener.outputs[-1].outputs[0])
            assert [end.finish_reason for end in ends] == ["rejected", "length"]
            assert "isn't a whole safetensors file" in str(ends[0].stop_reason)
            await engine.load_adapter("a", None)
            assert engine.adapters == {}
            listener = Collector()
            await engine.submit(
                "late", PROMPT, GREEDY, listener, lora_request=LoRARequest("a", 1, str(good))
            )
            await listener.over.wait()
            assert "was unloaded" in str(listener.error)

    asyncio.run(main())


def test_an_engine_without_adapters_loads_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with served("thread", tmp_path) as there:
            with pytest.raises(RequestError, match="takes no adapters"):
                await there.engine.load_adapter("a", str(tmp_path))

    asyncio.run(main())
