"""`dovetail serve` understands the arguments of `LLM()` as flags, vLLM's included."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.config.engine import EngineConfig
from dovetail.errors import ConfigError
from dovetail.front import vllm_args
from dovetail.front.vllm_args import TABLE, translated
from dovetail_server import engine_flags
from dovetail_server.command import app as serve_app
from dovetail_server.settings import ServerSettings
from dovetail_server.supervisor import Supervisor


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "_logged", set())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], ServerSettings]]:
    """The config and settings of each supervisor, which starts no process."""
    made: list[tuple[str, list[str], ServerSettings]] = []

    def init(_: Supervisor, sources: list[Any], settings: ServerSettings) -> None:
        [one] = sources
        made.append((one.source, one.overrides, settings))

    monkeypatch.setattr(Supervisor, "__init__", init)
    monkeypatch.setattr(Supervisor, "run", lambda supervisor: 0)
    return made


@pytest.fixture(scope="module")
def command() -> Callable[..., None]:
    """`dovetail serve demo`, made once: each call of `dovetail` searches for plugins and makes
    hundreds of flags."""
    made: Any = typer.main.get_command(serve_app)

    def run(*args: str) -> None:
        with suppress(SystemExit):
            made.main(["demo", *args], prog_name="serve", standalone_mode=False)

    return run


def config_of(started: list[Any]) -> EngineConfig:
    [(source, sets, _)] = started
    return EngineConfig.load(source, **EngineConfig.read_settings(sets))


def serve(*args: str) -> Any:
    return CliRunner().invoke(app, ["serve", "demo", *args])


def refusal(*args: str) -> str:
    done = serve(*args)
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        (["--max-model-len", "128"], {"max_model_len": 128}),
        (["--max-model-len=128"], {"max_model_len": 128}),
        (["--max_model_len=128"], {"max_model_len": 128}),
        (["--max-model-len", "-1"], {}),
        (["--max-model-len", "0.128k"], {"max_model_len": 128}),
        (["--max-num-batched-tokens", "2K"], {"max_num_batched_tokens": 2048}),
        (["--kv-cache-memory-bytes", "1.5M"], {"kv_cache_memory": 3 * 2**19}),
        (["--gpu-memory-utilization", "0.8"], {"gpu_memory_utilization": 0.8}),
        (["--tensor-parallel-size", "2"], {"executor": {"name": "dovetail:tensor", "size": 2}}),
        (["-tp", "2"], {"executor": {"name": "dovetail:tensor", "size": 2}}),
        (["--tensor-parallel-size", "1"], {}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--enable-prefix-caching"], {"kv_cache": {"name": "dovetail:prefix", "reuse": True}}),
        (["--no-enable-prefix-caching"], {"kv_cache": {"name": "dovetail:prefix", "reuse": False}}),
        (["--enforce-eager"], {"cuda_graphs": False}),
        (["--no-cuda-graphs"], {"cuda_graphs": False}),
        (["--kv-cache-memory", "4MiB"], {"kv_cache_memory": 4 * 2**20}),
        (["--swap-space", "4"], {}),
        (["--no-enable-lora"], {}),
        (["--observers", "[log]"], {"observers": ["log"]}),
        (
            ["--scheduler", "sjf", "--set", "scheduler.aging_s=5"],
            {"scheduler": {"name": "sjf", "aging_s": 5}},
        ),
        (
            ["--set", "kv_cache={name: prefix}", "--enable-prefix-caching"],
            {"kv_cache": {"name": "prefix", "reuse": True}},
        ),
        (
            ["--set", "max_num_seqs=4", "--max-model-len", "128"],
            {"max_num_seqs": 4, "max_model_len": 128},
        ),
    ],
    ids=str,
)
def test_a_flag_does_what_the_argument_does(
    flags: list[str], config: dict[str, Any], started: list[Any]
) -> None:
    done = serve(*flags)
    assert done.exit_code == 0, done.output
    assert config_of(started) == EngineConfig.load("demo", **config)


@pytest.mark.parametrize(
    "row",
    [TABLE[name] for name in engine_flags.ENGINE_FLAGS if name in TABLE],
    ids=lambda row: row.name,
)
def test_each_row_of_the_table_is_a_flag(
    row: vllm_args.Argument, started: list[Any], command: Callable[..., None]
) -> None:
    for value in (*row.accepted, *row.rejected):
        flag = f"--{row.name}".replace("_", "-")
        if row.is_switch != (type(value) is bool) or value in ("", None, {}):
            continue
        given = (
            flag if value is True else f"--no-{flag[2:]}" if value is False else f"{flag}={value}"
        )
        if value in row.rejected:
            with pytest.raises(ConfigError) as refused:
                command(given)
            text = str(refused.value)
            assert row.name in text or flag in text
            assert row.advice in text
        else:
            started.clear()
            command(given)
            assert config_of(started) == EngineConfig.load("demo", **translated({row.name: value}))


def test_a_translation_is_told_in_one_line(
    started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        serve(
            "--enforce-eager",
            "--max-model-len",
            "64",
            "--ssl-certfile=c",
            "--ssl-keyfile=k",
            "--enable-auto-tool-choice",
        ).exit_code
        == 0
    )
    assert {(record.levelno, record.name) for record in caplog.records} == {
        (logging.WARNING, "dovetail")
    }
    assert [record.message for record in caplog.records] == [
        "--ssl-certfile: here --tls-cert",
        "--ssl-keyfile: here --tls-key",
        "--enable-auto-tool-choice: ignored, the chat template selects the parser of tool calls",
        "enforce_eager=True: here cuda_graphs=False",
    ]
    assert (started[0][2].tls_cert, started[0][2].tls_key) == ("c", "k")


def test_own_flags_keep_their_meaning(started: list[Any]) -> None:
    own = [
        "--chat-template",
        "{{ messages }}",
        "--prefix-cache-reset",
        "--advisory-fields=refuse",
        "--host",
        "::1",
        "--port",
        "0",
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--served-model-name",
        "x",
        "--reasoning-parser",
        "null",
    ]
    assert serve(*own, "--disable-log-requests", "--api-server-count", "2").exit_code == 0
    [(_, sets, settings)] = started
    assert sets == []
    assert settings == ServerSettings(
        host="::1",
        port=0,
        api_keys=("a", "b"),
        served_model_name=("x",),
        reasoning_parser=None,
        log_requests=False,
        front_ends=2,
        chat_template="{{ messages }}",
        prefix_cache_reset=True,
        advisory_fields="refuse",
    )
    assert not engine_flags.ENGINE_FLAGS.keys() & ServerSettings.model_fields.keys()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--max-model-len", "many"],
            "--max-model-len: max_model_len: expected a valid integer, got 'many'",
        ),
        (["--max-model-len", "4.5"], "--max-model-len: max_model_len: "),
        (["--max-model-len", "1.2345k"], "--max-model-len: 1.2345k isn't a whole number"),
        (
            ["--max-model-len", "4kb"],
            "--max-model-len: max_model_len: expected a valid integer, got '4kb'",
        ),
        (
            ["--max-num-seqs", "4k"],
            "--max-num-seqs: max_num_seqs: expected a valid integer, got '4k'",
        ),
        (["--max-model-len="], "--max-model-len: needs a value"),
        (["--max-model-len", "[1"], "--max-model-len:1: not valid YAML"),
        (["--max-model-len"], "requires an argument"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: gpu_memory_utilization: "),
        (
            ["--num-gpu-blocks-override", "many"],
            "num_gpu_blocks_override='many': executor.num_pages must be a number",
        ),
        (
            ["--tensor-parallel-size", "two"],
            "tensor_parallel_size='two': executor.size must be a whole number",
        ),
        (
            ["--pipeline-parallel-size", "2"],
            'pipeline_parallel_size=2: Dovetail can\'t do that yet: see "Several machines"',
        ),
        (["--dtype", "int3"], "--dtype: dtype: "),
        (["--enforce-eager=true"], "does not take a value"),
        (["--enforce-eager", "true"], "--enforce-eager: takes no value"),
        (["--enable-auto-tool-choice=yes"], "--enable-auto-tool-choice: takes no value"),
        (["--max-model-len", "64", "--max_model_len=65"], "--max-model-len: given twice"),
        (["--enforce-eager", "--no-enforce-eager"], "--enforce-eager: given twice"),
        (["--tensor-parallel-size", "2", "-tp", "2"], "--tensor-parallel-size: given twice"),
        (
            ["--enforce-eager", "--cuda-graphs"],
            "enforce_eager sets cuda_graphs, which is also given",
        ),
        (
            ["--num-gpu-blocks-override=8", "--num-kvcache-blocks=8"],
            "sets executor.num_pages, which is also given",
        ),
        (
            ["--executor", "local", "-tp", "2"],
            "tensor_parallel_size sets executor.name, which is also given",
        ),
        (
            ["--max-model-len", "64", "--set", "max_model_len=64"],
            "--max-model-len sets max_model_len, which --set also sets",
        ),
        (
            ["--set", "executor={size: 2}", "-tp", "2"],
            "--tensor-parallel-size sets executor.size, which --set also sets",
        ),
        (
            ["--set", "executor=local", "-tp", "2"],
            "--tensor-parallel-size sets executor.name, which --set also sets",
        ),
        (
            ["--set", "scheduler.name=fcfs", "--scheduler", "sjf"],
            "--scheduler sets scheduler, which --set also sets",
        ),
        (["--max-model-length", "64"], "--max-model-len"),
        (["--model", "demo"], "--model: pass the model as an argument"),
        (["--allowed-origins", '["*"]'], "--allowed-origins: use --cors-origin, once per origin"),
    ],
    ids=str,
)
def test_a_flag_that_cannot_be_honoured_is_refused_with_its_name(
    flags: list[str], told: str, started: list[Any]
) -> None:
    assert told in refusal(*flags)
    assert started == []


@pytest.mark.parametrize("token", ["hf_secret", "[hf_secret", "{hf_secret: hf_secret"])
def test_a_token_for_the_hub_is_never_shown(
    token: str, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert "secret" not in refusal("--hf-token", token) + caplog.text


def test_after_two_dashes_nothing_is_a_flag(started: list[Any]) -> None:
    assert "'--model' is not a directory" in refusal("--", "--model")
