"""`dovetail_cluster.serve:app`: a replica streams as `dovetail serve` does, and wrong arguments are
refused by name.

CI runs what needs no Ray; `make test-cluster` sets DOVETAIL_TEST_RAY=1, and the application is
served by Ray Serve.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from bench.batch import RayCluster

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, EngineDeadError, MissingExtraError
from dovetail_cluster.serve import ServeReplica, app
from tests.cluster.ray_clusters import fake_only, place, real_cluster, real_only

__all__ = ["place", "real_cluster"]  # fixtures

BODY = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 12, "temperature": 0.8, "seed": 7}


def of_generate() -> str:
    with LLM("demo") as llm:
        return (
            llm.generate(
                "ROMEO:", SamplingParams(max_tokens=12, temperature=0.8, seed=7), use_tqdm=False
            )[0]
            .outputs[0]
            .text
        )


def metric(name: str) -> float:
    lines = httpx.get("http://127.0.0.1:8000/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


class FakeServe(ModuleType):
    """The module `ray.serve`, with the two calls that `app` makes: an application is what was given
    to them."""

    def deployment(self, **options: Any) -> Any:
        return lambda cls: SimpleNamespace(bind=lambda *args: (cls, args, options))

    def ingress(self) -> Any:
        return lambda cls: cls


@pytest.fixture
def fake_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ModuleType("ray")
    ray.serve = FakeServe("ray.serve")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.mark.slow("makes two engines")
@fake_only
@pytest.mark.usefixtures("fake_serve")
def test_a_replica_streams_the_text_of_generate() -> None:
    cls, (config, settings), _ = app({"engine": "demo"})

    async def streamed() -> list[str]:
        replica = cls(config, settings)
        routes = await replica.__serve_build_asgi_app__()
        replica.check_health()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(routes), base_url="http://replica"
        ) as client:
            answer = await client.post("/v1/completions", json={**BODY, "stream": True})
        replica.__del__()
        return [line for line in answer.text.splitlines() if line.startswith("data: ")]

    lines = asyncio.run(streamed())
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3
    assert (
        "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == of_generate()
    )


@fake_only
@pytest.mark.usefixtures("place", "fake_serve")
def test_a_replica_whose_engine_has_died_is_not_healthy() -> None:
    async def dies() -> None:
        replica = ServeReplica(
            {"model": "demo", "executor": {"name": "toy", "fails_at_step": 2}}, {}
        )
        routes = await replica.__serve_build_asgi_app__()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(routes), base_url="http://replica"
        ) as client:
            answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code >= 500
        async with asyncio.timeout(10):
            while True:
                await asyncio.sleep(0)
                replica.check_health()

    with pytest.raises(EngineDeadError, match="the device was lost at step 2"):
        asyncio.run(dies())


@fake_only
@pytest.mark.usefixtures("fake_serve")
def test_arguments_become_options_of_ray_and_of_the_server() -> None:
    arguments = {
        "engine": {"model": "demo", "max_num_seqs": 4},
        "replicas": "2",
        "gpus": "1",
        "api_keys": "a,b",
        "request_timeout_s": "null",
    }
    cls, (config, settings), options = app(arguments)
    assert cls is ServeReplica
    assert (config["max_num_seqs"], settings["api_keys"], settings["request_timeout_s"]) == (
        4,
        ["a", "b"],
        None,
    )
    assert (options["num_replicas"], options["ray_actor_options"]) == (
        2,
        {"num_cpus": 1, "num_gpus": 1},
    )


@fake_only
@pytest.mark.usefixtures("fake_serve")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"egine": "demo"}, "egine: unknown argument"),
        ({"replicas": "0"}, "replicas: expected an integer >= 1, got '0'"),
        ({"replicas": True}, "replicas: expected an integer >= 1, got True"),
        ({"gpus": "one"}, "gpus: expected an integer >= 0, got 'one'"),
        ({"port": "80"}, "port: Ray Serve listens"),
        ({"tls_cert": "x"}, "tls_cert: Ray Serve listens"),
        ({"batch_directory": "x"}, "batch_directory: replicas can't share"),
        ({"max_body_bytes": "none"}, "max_body_bytes: Input should be a valid integer"),
        ({"engine": {"model": "demo", "max_num_seq": 4}}, "max_num_seq"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        app(arguments)
    assert told in str(error.value)


@fake_only
def test_without_ray_the_pip_line_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r'pip install "dovetail-llm\[ray\]"'):
        app({})


@real_only
def test_ray_serve_streams_the_text_of_generate_and_aborts_unread_streams(
    real_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    import openai
    import ray
    from ray import serve

    ray.init(address=real_cluster.address, log_to_driver=False)
    try:
        serve.run(app({"engine": "demo", "max_queued_requests": "4"}), route_prefix="/")
        client = openai.OpenAI(
            base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, timeout=60
        )
        chunks = [chunk.choices[0].text for chunk in client.completions.create(**BODY, stream=True)]  # type: ignore[call-overload]
        assert len(chunks) > 3
        assert "".join(chunks) == of_generate()
        unread = client.completions.create(
            model="demo", prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(unread))
        assert metric("vllm:num_requests_running") == 1
        unread.close()
        until = time.monotonic() + 60
        while metric("vllm:num_requests_running") and time.monotonic() < until:
            pass
        assert metric("vllm:generation_tokens_total") < 900, "the engine has gone on for nobody"
    finally:
        serve.shutdown()
        ray.shutdown()
