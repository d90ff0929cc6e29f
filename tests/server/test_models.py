"""Several models behind one server: each request goes to the engine of its model, and an engine
that is down takes only its own model with it. Memory is shared out by weights unless told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dovetail.errors import ConfigError
from dovetail_server.app import app_of
from dovetail_server.engine_sources import BESIDE_WEIGHTS_BYTES, EngineSource, sources_of
from dovetail_server.models import Model, Models
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

SETTINGS = ServerSettings()
GPU, CPU = "gpu_memory_utilization", "cpu_memory_utilization"


@asynccontextmanager
async def served(
    models: Models, settings: ServerSettings = SETTINGS
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(app_of(models, settings)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield client


def model(engine: FakeEngine, name: str, settings: ServerSettings = SETTINGS) -> Model:
    return Model.of(engine, settings, (name,))


async def said(client: httpx.AsyncClient, **body: Any) -> tuple[str, str]:
    """The model's name and the text of an answer."""
    answer = await client.post("/v1/completions", json={"prompt": "O", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["model"], answer.json()["choices"][0]["text"]


@pytest.mark.anyio
async def test_each_request_goes_to_the_engine_of_its_model(
    fake: Callable[..., FakeEngine],
) -> None:
    one, two = fake("one"), fake("two", max_model_len=64)
    two.adapters["tuned"] = "/tuned"
    async with served(Models([model(one, "a"), model(two, "b")])) as client:
        assert await said(client, model="b") == ("b", "two")
        assert await said(client, model="a") == ("a", "one")
        assert await said(client) == ("a", "one"), "the first, if none is named"
        listed = (await client.get("/v1/models")).json()["data"]
        unknown = await client.post("/v1/completions", json={"prompt": "O", "model": "c"})
        long = {"prompt": [5] * 100}
        within = await client.post("/v1/completions", json={**long, "model": "a"})
        beyond = await client.post("/v1/completions", json={**long, "model": "b"})
    assert [(told["id"], told["parent"]) for told in listed] == [
        ("a", None),
        ("b", None),
        ("tuned", "b"),
    ]
    assert unknown.status_code == 404
    assert "available: a, b, tuned" in unknown.json()["error"]["message"]
    assert (within.status_code, beyond.status_code) == (200, 400)


@pytest.mark.anyio
async def test_a_lost_engine_takes_only_its_own_model_with_it(
    fake: Callable[..., FakeEngine],
) -> None:
    one, two = fake("one"), fake("two")
    models = Models([model(one, "a"), model(two, "b"), ("c",)])
    models.lose(2, "c has died before: /srv/secret/model.yaml")
    async with served(models) as client:
        two.die("b has died")
        models.lose(1, "b has died")
        health = await client.get("/health")
        ready = await client.get("/ready")
        lost = [
            await client.post("/v1/completions", json={"prompt": "O", "model": name})
            for name in "bc"
        ]
        assert await said(client, model="a") == ("a", "one")
        models.put(1, model(fake("again"), "b"))
        models.put(2, model(fake("at last"), "c"))
        assert await said(client, model="b") == ("b", "again")
        assert await said(client, model="c") == ("c", "at last")
        assert (await client.get("/health")).json() == {"status": "ok"}
        for engine in (one, *(each.engine for each in models)):
            engine.die("all have died")  # type: ignore[attr-defined]  # fakes
        assert (await client.get("/health")).status_code == 503
    down = {"b": "b has died", "c": "c has died before: …/model.yaml"}
    assert (health.status_code, health.json()) == (200, {"status": "degraded", "down": down})
    assert ready.status_code == 200
    assert [answer.status_code for answer in lost] == [503, 503]
    assert "c has died before" in lost[1].text


@pytest.mark.anyio
async def test_a_label_tells_the_metrics_of_models_apart(fake: Callable[..., FakeEngine]) -> None:
    async with served(Models([model(fake(), "a"), model(fake(), "b")])) as client:
        await said(client, model="b")
        text = (await client.get("/metrics")).text
        live = (await client.get("/page/live", params={"model": "b"})).json()
        unknown = await client.get("/page/live", params={"model": "c"})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE vllm:generation_tokens") == 1
    generated = families["vllm:generation_tokens"].samples
    assert {sample.labels["model_name"]: sample.value for sample in generated} == {"a": 0, "b": 4}
    assert (live["model"], live["models"], live["generated_tokens"]) == ("b", ["a", "b"], 4)
    assert unknown.status_code == 404


@pytest.mark.anyio
async def test_adapters_are_loaded_for_the_model_that_is_named(
    fake: Callable[..., FakeEngine],
) -> None:
    one, two = fake("one"), fake("two")
    settings = ServerSettings(adapter_directory="/adapters")
    async with served(Models([model(one, "a"), model(two, "b")]), settings) as client:

        async def load(**body: str) -> int:
            body["lora_path"] = "x"
            return (await client.post("/v1/load_lora_adapter", json=body)).status_code

        assert await load(lora_name="tuned", model="b") == 200
        assert await load(lora_name="tuned", model="a") == 400, "b's has that name"
        assert await load(lora_name="b", model="a") == 400, "so has a model"
        assert await load(lora_name="mine") == 200
        assert (list(one.adapters), list(two.adapters)) == (["mine"], ["tuned"])
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"})
        assert not two.adapters


GIB = 1 << 30


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a config, with a model whose weights have a size."""

    def write(name: str, size: int, **config: Any) -> str:
        directory = tmp_path / name
        directory.mkdir()
        with (directory / "model.safetensors").open("wb") as file:
            file.truncate(size)  # a hole, which takes no space
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"model": str(directory), **config}))
        return str(path)

    return write


def test_memory_is_shared_out_by_weights_unless_told(write: Callable[..., str]) -> None:
    small, large = write("small", 0), write("large", 2 * BESIDE_WEIGHTS_BYTES)
    told = write("told", 7 * GIB, gpu_memory_utilization=0.1, cpu_memory_utilization=0.05)
    one, two, three = sources_of([small, large, told], [], SETTINGS)
    assert [each.shares[GPU] for each in (one, two, three)] == pytest.approx([0.2, 0.6, 0.1])
    assert [each.shares[CPU] for each in (one, two, three)] == pytest.approx([0.05, 0.15, 0.05])
    # an executor counts what others use as its own
    assert f"{GPU}=0.9000" in two.overrides_beside([one, three])
    assert f"{CPU}=0.1500" in two.overrides_beside([one, three])
    [one, two] = sources_of([small, large], [f"{GPU}=0.4"], SETTINGS)
    assert (one.shares[GPU], two.shares[GPU]) == pytest.approx((0.1, 0.3))
    greedy = write("greedy", 0, gpu_memory_utilization=0.95)
    with pytest.raises(ConfigError, match=rf"{GPU}: .* take 0\.95 "):
        sources_of([small, greedy], [], SETTINGS)


def test_one_model_keeps_its_config_and_may_have_several_names() -> None:
    settings = ServerSettings(served_model_name=("a", "b"), lora_modules=("x=/x",))
    [one] = sources_of(["no/such"], ["seed=1"], settings)
    assert one == EngineSource("no/such", ["seed=1"], ("a", "b"), ("x=/x",))
    assert one.overrides_beside([]) == ["seed=1"]


def test_models_are_told_apart_by_name(write: Callable[..., str]) -> None:
    one, two = write("one", 0), write("two", 0, adapters={})
    settings = ServerSettings(served_model_name=("a", "b"), lora_modules=("x=/x",))
    made = sources_of([one, two], [], settings)
    assert [(each.names, each.adapters) for each in made] == [(("a",), ()), (("b",), ("x=/x",))]
    assert sources_of([one, two], [], SETTINGS)[0].names[0].endswith("one")
    for sources, names, told in [
        ([one, one], (), "2 models are named"),
        ([one, two], ("a", "a"), "2 models are named 'a'"),
        ([one, two], ("a",), "2 models need one name each"),
    ]:
        with pytest.raises(ConfigError, match=told):
            sources_of(sources, [], ServerSettings(served_model_name=names))
    with pytest.raises(ConfigError, match="--lora-module: none of the models takes adapters"):
        sources_of([one, write("three", 0)], [], ServerSettings(lora_modules=("x=/x",)))
