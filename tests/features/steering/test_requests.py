"""Slots are scarce, and what can't be steered is refused by name, from a call as over HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dovetail import LLMEngine
from dovetail.errors import RequestError, UnsupportedError
from tests.adapters import install_fake
from tests.docs.pages import DOCS
from tests.features.steering import executors
from tests.features.steering.conftest import Oracle, Settings
from tests.features.steering.parts import DISTRIBUTION
from tests.features.steering.test_tokens import PROMPTS, Engine, add, finished
from tests.registry.fakes import Site
from tests.server.serving import serving_in_threads
from tests.small_model import small_demo


def running(engine: LLMEngine) -> set[str]:
    return {request.id for request in engine.core.books.running}


def test_a_request_that_finds_no_slot_waits_and_others_pass_it(engine: Engine) -> None:
    made = engine(executor={"slots": 2})
    for name in ("first", "second", "third"):
        add(made, name, PROMPTS[0], "calm", detokenize=False)
    add(made, "plain", PROMPTS[0], None, detokenize=False)
    made.step()
    assert running(made) == {"first", "second"}
    made.step()
    assert running(made) == {"first", "second", "plain"}
    made.abort_request("second")
    made.step()
    assert running(made) == {"first", "third", "plain"}
    assert {*finished(made)} >= {"first", "third", "plain"}


UNKNOWN = {DISTRIBUTION: {"vector": "rosy"}}
SAID_OF_UNKNOWN = f"extra.{DISTRIBUTION}.vector: no such vector; there are calm, grim, loud"


def test_a_request_for_an_unknown_vector_is_refused_by_name(engine: Engine) -> None:
    made = engine()
    with pytest.raises(RequestError) as refused:
        made.add_request("one", PROMPTS[0], extra=UNKNOWN)
    assert SAID_OF_UNKNOWN in str(refused.value)


@pytest.mark.parametrize("executor", [{"name": "local"}, {"name": "fake", "num_pages": 64}])
def test_an_engine_whose_executor_cant_steer_refuses_requests_by_name(
    executor: dict[str, Any], installed: Path, fakes: None
) -> None:
    config = {"model": small_demo(), "max_model_len": 64, "executor": executor}
    with LLMEngine.from_config(config) as made:
        with pytest.raises(RequestError, match=f"extra: '{DISTRIBUTION}' reads nothing from"):
            add(made, "one", [5, 17], "calm")
        assert not made.has_unfinished_requests()


def test_the_page_for_authors_shows_the_example_as_it_is() -> None:
    page = (DOCS / "plugins" / "executor.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```py title=.+?\n(.+?)```", page, re.DOTALL)
    assert shown in Path(executors.__file__).read_text(encoding="utf-8")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install_fake(Site(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer": 99}, "executor.layer is 99; the model has layers 0 to "),
        ({"vectors": {}}, "executor.vectors is empty"),
        ({"vectors": {"a": "absent.npy"}}, "executor.vectors.a: .*No such file"),
        ({"vectors": {"a": "short.npy"}}, r"executor.vectors.a: .*, found shape \(3,\)"),
        ({"vectors": {"a": "text.npy"}}, "executor.vectors.a: "),
    ],
    ids=["layer", "none", "absent", "short", "text"],
)
def test_an_engine_doesnt_start_with_what_doesnt_fit_the_model(
    options: dict[str, Any],
    said: str,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("short.npy", np.zeros(3, np.float32))
    Path("text.npy").write_text("no array")
    with pytest.raises(UnsupportedError, match=said):
        engine(executor=options)


def test_requests_over_http_are_steered_and_unknown_vectors_get_a_400(
    settings: Settings, oracle: Oracle
) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0.0, "return_token_ids": True}
    body |= {"ignore_eos": True}
    with serving_in_threads(settings()) as url:
        for vector in ("calm", None):
            extra = {} if vector is None else {"extra": {DISTRIBUTION: {"vector": vector}}}
            answer = httpx.post(f"{url}/v1/completions", json=body | extra).json()
            tokens = answer["choices"][0]["token_ids"]
            assert tokens == oracle.generated(PROMPTS[0], vector, 8)
        answer = httpx.post(f"{url}/v1/completions", json=body | {"extra": UNKNOWN})
    assert answer.status_code == 400
    assert SAID_OF_UNKNOWN in answer.json()["error"]["message"]
