"""Values of requests for components (`extra`, `extra_args`, `logits_processors`,
`predicted_tokens`) reach them from everywhere, and wrong ones are refused by name."""

from __future__ import annotations

import importlib
import json
import queue
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from dovetail import LLM, SamplingParams
from dovetail.cli.app import app
from dovetail.errors import RequestError
from dovetail_batch.engine_process import EngineWorker
from dovetail_batch.rows import RowReader
from dovetail_batch.sources import fields_of
from tests.registry.fakes import Site, components, modules_forgotten
from tests.server.serving import serving_in_threads

torch.set_num_threads(1)

COMPONENTS = """
from dovetail.api.logits_processor import LogitsProcessor
from dovetail.api.sampler import SamplerCapabilities
from dovetail_samplers.default import DefaultSampler
from dovetail_schedulers.fcfs import FCFS
from pydantic import BaseModel, ConfigDict, Field

SEEN = []  # what the policy was shown of each request, in order
DRAWN = []  # what the sampler was told of each row, and then the logits processor

class Extra(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tier: int = Field(0, ge=0, le=9, strict=True)
    notes: object = None

class Args(BaseModel):
    strength: float = Field(1.0, gt=0)

class Policy(FCFS):
    def schedule(self, step):
        SEEN.extend((one.extra["dovetail-told"].tier if one.extra else None, one.predicted_tokens) for one in step.waiting)
        super().schedule(step)

class Told(DefaultSampler):
    capabilities = SamplerCapabilities(logprobs=True, extra_args_model=Args, processors=True)

    def update(self, removed, added):
        DRAWN.extend(one.sampling.extra_args.get("strength") for one in added)
        super().update(removed, added)

class Gains(BaseModel):
    gain: float = Field(gt=0, le=9, strict=True)

class Gain(LogitsProcessor):
    Arguments = Gains

    def prepare(self, max_rows):
        pass

    def update(self, removed, added):
        DRAWN.extend(one.arguments.gain for one in added)

    def apply(self, logits, lines):
        pass
"""
PLUGIN = components(
    'kind="scheduler", name="told", target="told_components:Policy", '
    'request_extra="told_components:Extra"',
    'kind="sampler", name="told", target="told_components:Told"',
    'kind="logits_processor", name="told", target="told_components:Gain"',
)
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "scheduler": "told",
    "sampler": "told",
    "logits_processors": ["told"],
}
OF_PARAMS: dict[str, Any] = {
    "extra_args": {"strength": 0.5},
    "logits_processors": {"told": {"gain": 2.0}},
}  # fields of `SamplingParams`
VALUES: dict[str, Any] = {
    "extra": {"dovetail-told": {"tier": 3}},
    "predicted_tokens": 5,
    **OF_PARAMS,
}
XARGS = {
    **{name: value for name, value in VALUES.items() if name != "extra_args"},
    "vllm_xargs": VALUES["extra_args"],
}
REACHED = ([(3, 5)], [0.5, 2.0])
DEEP: Any = 0
for _ in range(60):
    DEEP = [DEEP]
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"extra": {"dovetail-other": {}}},
        "extra: 'dovetail-other' reads nothing from requests; those that do: dovetail-told",
    ),
    (
        {"extra": {"dovetail-told": {"tier": 10}}},
        "extra.dovetail-told.tier: expected less than or equal to 9, got 10",
    ),
    (
        {"extra": {"dovetail-told": {"tier": "1"}}},
        "extra.dovetail-told.tier: expected a valid integer, got '1'",
    ),
    (
        {"extra": {"dovetail-told": {"teir": 1}}},
        "extra.dovetail-told.teir: unknown key, did you mean tier?",
    ),
    ({"extra": {"dovetail-told": 3}}, "extra.dovetail-told: "),
    (
        {"extra": {"dovetail-told": {"notes": "x" * 70_000}}},
        "extra: all items and characters in it must be at most 65536 (limits.max_extra_size) "
        "together",
    ),
    ({"extra": {"dovetail-told": {"notes": DEEP}}}, "extra: more than 50 "),
    (
        {"predicted_tokens": -1},
        "predicted_tokens must be an integer from 0 to 9223372036854775807 or None, got -1",
    ),
    ({"extra_args": {"strength": 0}}, "extra_args.strength: expected greater than 0, got 0"),
    (
        {"logits_processors": {"told": {"gain": 10.0}}},
        "logits_processors.told.gain: expected less than or equal to 9, got 10.0",
    ),
    ({"logits_processors": {"told": {}}}, "logits_processors.told.gain: "),
    (
        {"logits_processors": {"gold": {"gain": 1.0}}},
        "logits_processors: this engine has no 'gold'; it has: dovetail-told:told",
    ),
    (
        {"logits_processors": {"told": {"gain": DEEP}}},
        "logits_processors: more than 32 containers within each other",
    ),
    (
        {"extra_args": {"power": 1}},
        "extra_args: 'power' means nothing to sampler told; it understands: strength",
    ),
    ({"extra_args": {"strength": DEEP}}, "extra_args: more than 32 containers within each other"),
    (
        {"extra_args": {"strength": "x" * 70_000}},
        "extra_args: all items and characters in it must be at most 65536 (limits.max_extra_size) "
        "together",
    ),
]
TYPES: list[dict[str, Any]] = [
    {"extra": 3},
    {"extra": ["dovetail-told"]},
    {"predicted_tokens": "5"},
    {"predicted_tokens": 1.5},
    {"extra_args": "x"},
]
TYPES += [{"logits_processors": "told"}, {"logits_processors": ["told"]}]

Told = Callable[[], tuple[list[Any], list[Any]]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The components are installed; returns what they were told since the last call."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, modules_forgotten(folder):
        patch.delenv("DOVETAIL_PLUGINS", raising=False)
        patch.syspath_prepend(str(folder))
        Site(folder).install(
            "dovetail-told", modules={"told_plugin": PLUGIN, "told_components": COMPONENTS}
        )
        module = importlib.import_module("told_components")

        def told() -> tuple[list[Any], list[Any]]:
            found = list(module.SEEN), list(module.DRAWN)
            module.SEEN.clear()
            module.DRAWN.clear()
            return found

        yield told


@pytest.fixture(scope="module")
def llm(installed: Told) -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm
        assert llm.engine.core.dead is None


@pytest.fixture(scope="module")
def url(installed: Told) -> Iterator[str]:
    with serving_in_threads(SETTINGS) as url:
        yield url


def params(values: Mapping[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        **fields,
        **{name: value for name, value in values.items() if name in OF_PARAMS},
    )


def others(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in OF_PARAMS}


# The library


def test_lists_of_prompts_carry_them_once_for_all_or_one_by_one(llm: LLM, installed: Told) -> None:
    llm.generate("A", params(VALUES), False, **others(VALUES))
    assert installed() == REACHED
    list(llm.stream("A", params(VALUES), **others(VALUES)))
    assert installed() == REACHED
    llm.chat([{"role": "user", "content": "A"}], params(VALUES), False, **others(VALUES))
    assert installed() == REACHED
    llm.generate(
        ["A", "B"],
        params({}),
        False,
        extra=[None, {"dovetail-told": {"tier": 1}}],
        predicted_tokens=(7, None),
    )
    assert installed() == ([(None, 7), (1, None)], [None, None])
    llm.generate(["A", "B"], params({}), False, **others(VALUES))
    assert installed()[0] == [(3, 5)] * 2


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_wrong_values_are_refused_before_anything_is_computed(
    llm: LLM, installed: Told, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(["A", "B"], params(wrong), False, **others(wrong))
    assert str(refused.value).startswith(said)
    assert len(str(refused.value)) < 300
    assert installed() == ([], [])


@pytest.mark.parametrize(
    "wrong", [*TYPES, {"extra": [{}]}, {"predicted_tokens": [1, 2, 3]}], ids=str
)
def test_wrong_types_and_numbers_of_values_are_refused(
    llm: LLM, installed: Told, wrong: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(wrong))} must "):
        llm.generate(["A", "B"], params(wrong), False, **others(wrong))
    assert installed() == ([], [])


# HTTP

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "A", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
    "/v1/responses": {"input": "A", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("values", [VALUES, XARGS], ids=["extra_args", "vllm_xargs"])
def test_requests_of_all_apis_carry_them(
    url: str, installed: Told, path: str, values: dict[str, Any]
) -> None:
    answer = httpx.post(url + path, json={**BODIES[path], **values})
    assert answer.status_code == 200, answer.text
    assert installed() == REACHED


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_wrong_values_in_a_body_are_a_400_that_names_them(
    url: str, installed: Told, wrong: dict[str, Any], said: str
) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={**BODIES["/v1/completions"], **wrong})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(said)
    assert said.startswith(error["param"])
    assert installed() == ([], [])


@pytest.mark.parametrize(
    "wrong", [*TYPES, {"vllm_xargs": 3}, {"extra_args": {}, "vllm_xargs": {}}], ids=str
)
def test_wrong_types_in_a_body_are_a_400_that_names_them(url: str, wrong: dict[str, Any]) -> None:
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={**BODIES["/v1/chat/completions"], **wrong}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(wrong)[-1])


def test_an_error_about_vllm_xargs_names_that_parameter(url: str) -> None:
    answer = httpx.post(
        f"{url}/v1/completions", json={**BODIES["/v1/completions"], "vllm_xargs": {"power": 1}}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vllm_xargs")


# Files of prompts


def test_lines_of_a_prompts_file_and_options_carry_them(installed: Told, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"prompt": "A", **values})
            for values in (VALUES, {"extra": {"dovetail-told": {"tier": 1}}})
        )
        + '\n"B"\n'
    )
    settings = [
        text
        for key in ("scheduler=told", "sampler=told", "logits_processors=[told]")
        for text in ("--set", key)
    ]
    common = ["generate", "demo", *settings, "--max-tokens", "1"]
    done = CliRunner().invoke(
        app, [*common, "--prompts-file", str(path), "--param", "predicted_tokens=9"]
    )
    assert done.exit_code == 0, done.output
    assert installed() == ([(3, 5), (1, 9), (None, 9)], [0.5, None, None, 2.0])
    given = [
        text
        for name, value in VALUES.items()
        for text in ("--param", f"{name}={json.dumps(value)}")
    ]
    done = CliRunner().invoke(app, [*common, "A", *given])
    assert done.exit_code == 0, done.output
    assert installed() == REACHED


# Batch jobs


def answered(llm: LLM, *rows: Mapping[str, Any]) -> list[Any]:
    """Return the errors of rows, computed as a job's engine computes them."""
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader, answers = RowReader({"max_tokens": 1}, 0), list[Any]()
    received.put([reader.read(number, row) for number, row in enumerate(rows, start=1)])
    received.put(None)
    EngineWorker(llm.engine, received, answers.extend).run()
    return [answer["error"] for answer in sorted(answers, key=lambda one: one["row"])]


def row_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": "A",
        **others(values),
        "sampling": {name: value for name, value in values.items() if name in OF_PARAMS},
    }


def test_rows_of_a_batch_job_carry_them(llm: LLM, installed: Told) -> None:
    assert answered(llm, row_of(VALUES), row_of({})) == [None, None]
    assert installed() == ([(3, 5), (None, None)], [0.5, None, 2.0])
    body = {"model": "demo", "prompt": "A", **XARGS}
    assert answered(
        llm,
        fields_of(
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
            limited=True,
        ),
    ) == [None]
    assert installed() == REACHED


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_wrong_values_of_a_row_fail_the_row_by_name(
    llm: LLM, installed: Told, wrong: dict[str, Any], said: str
) -> None:
    try:
        first, second = answered(llm, row_of(wrong), row_of({}))
        assert second is None
    except RequestError as error:  # the row isn't even read
        first = str(error)
    assert first.removeprefix("sampling: ").startswith(said)
    installed()
