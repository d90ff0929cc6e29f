"""The executor `local`: what it says, which options it takes, and that it computes what the model's
reference computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from dovetail.api.executor import Capacity
from dovetail.errors import ConfigError, DovetailError, ModelLoadError
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions
from tests.runtime.demo import BLOCK_BYTES, DEMO, context, decode, prefill

PROMPTS = [[5, 17, 200, 31, 8, 90, 12, 44, 7, 7, 301], [9, 12], [400, 3, 77]]


def executor(options: Mapping[str, Any] | None = None, **changes: Any) -> LocalExecutor:
    return LocalExecutor(LocalOptions(**{"device": "cpu", **(options or {})}), context(**changes))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[LocalExecutor, Capacity]]:
    local = executor({"num_pages": 30, "max_in_flight": 3})
    yield local, local.start()
    local.stop()


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int], int], list[int]]:
    """Greedy generation by transformers."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def generate(prompt: list[int], count: int) -> list[int]:
        tokens = torch.tensor([prompt])
        for _ in range(count):
            with torch.no_grad():
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        found: list[int] = tokens[0, len(prompt) :].tolist()
        return found

    return generate


def test_it_generates_what_transformers_does_with_steps_in_flight(
    started: tuple[LocalExecutor, Capacity], reference: Callable[[list[int], int], list[int]]
) -> None:
    local, capacity = started
    handles = [
        local.submit(prefill(capacity, PROMPTS)),
        local.submit(decode(3, 1)),
        local.submit(decode(3, 2)),
    ]
    results = [local.collect(handle) for handle in handles]
    assert [result.step for result in results] == [0, 1, 2]
    for row, prompt in enumerate(PROMPTS):
        assert [int(result.token_ids[row]) for result in results] == reference(prompt, 3)


def test_it_says_what_it_chose(started: tuple[LocalExecutor, Capacity]) -> None:
    capacity = started[1]
    assert capacity.num_pages == 30
    assert capacity.max_in_flight == 3
    assert capacity.max_model_len == 64
    assert capacity.vocab_size == 1024
    assert capacity.layout.block_size == 16
    assert capacity.layout.page_bytes == BLOCK_BYTES
    details = dict(capacity.details)
    assert details["attention"] == "dovetail:torch"
    assert details["dtype"] == "float32"
    assert details["model"] == "Qwen3ForCausalLM"
    assert details["device"].startswith("cpu")
    assert details["parameters"].endswith("M")


def test_on_the_cpu_one_step_is_in_flight_unless_more_are_asked() -> None:
    local = executor()
    assert local.start().max_in_flight == 1
    local.stop()


def test_its_options_reach_the_worker_and_its_errors_name_them() -> None:
    with pytest.raises(ConfigError, match=r"^executor\.device: 'gpu' isn't a device"):
        executor({"device": "gpu"}).start()
    with pytest.raises(ConfigError, match="and num_pages: 3 gives 3"):
        executor({"num_pages": 3}).start()


def test_stop_is_fine_twice_and_after_a_failed_start_and_before_any() -> None:
    local = executor(model="no/such/place")
    local.stop()
    with pytest.raises(ModelLoadError):
        local.start()
    local.stop()
    local.stop()
    with pytest.raises(DovetailError, match="executor local isn't running"):
        local.submit(decode(1, 0))


def test_threads_that_no_machine_has_are_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1024"):
        LocalOptions(threads=10**9)


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    try:
        local = executor({"threads": 2})
        assert local.start().details["device"] == "cpu (2 threads)"
        local.stop()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "options", [{"devise": "cpu"}, {"num_pages": 0}, {"max_in_flight": 0}, {"threads": 0}]
)
def test_unknown_and_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LocalOptions(**options)
