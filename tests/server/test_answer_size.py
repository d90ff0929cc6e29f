"""The size of a generated answer is bounded before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dovetail import SamplingParams
from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.intake_facts import IntakeFacts
from dovetail_server.answer_size import LOGPROB_BYTES, TOKEN_BYTES, with_bounded_answer
from tests.server.serving import serving_in_threads

FACTS = IntakeFacts(
    Limits(max_answer_bytes=100 * LOGPROB_BYTES), 1000, 50, GenerationDefaults(), "fake", "fake"
)


def bounded(
    prompts: list[int], *, copies: int = 1, streamed: bool = False, **params: Any
) -> int | None:
    """The `max_tokens` of a request."""
    return with_bounded_answer(
        SamplingParams(**params), prompts, FACTS, copies=copies, streamed=streamed
    ).max_tokens


def test_an_answer_without_log_probabilities_may_be_of_any_length() -> None:
    assert bounded([1] * 100, n=10, max_tokens=None) is None
    assert bounded([1], max_tokens=1000) == 1000


def test_log_probabilities_bound_prompts_times_samples_times_tokens_times_alternatives() -> None:
    room = FACTS.limits.max_answer_bytes - TOKEN_BYTES * 2
    for prompts, n, top in ((2, 1, 0), (2, 5, 0), (2, 1, 4), (2, 2, 3)):
        most = room // (prompts * n * (1 + top) * LOGPROB_BYTES)
        asked = {"n": n, "logprobs": top}
        assert bounded([1] * prompts, max_tokens=most, **asked) == most
        assert bounded([1] * prompts, max_tokens=None, **asked) == most
        assert bounded([1] * prompts, max_tokens=10**6, streamed=True, **asked) == 10**6
        with pytest.raises(
            RequestError, match=rf"room for {most} tokens each \(limits\.max_answer_bytes is"
        ):
            bounded([1] * prompts, max_tokens=most + 1, **asked)
    with pytest.raises(RequestError, match="room for 0 tokens"):
        bounded([1], n=101, logprobs=0, max_tokens=None)


def test_what_is_longer_than_the_model_counts_as_the_model_s_length() -> None:
    wide = dataclasses.replace(FACTS, max_model_len=40)
    for asked in (None, 40, 10**6):
        assert (
            with_bounded_answer(
                SamplingParams(logprobs=1, max_tokens=asked), [1], wide, copies=1, streamed=False
            ).max_tokens
            == asked
        )


def test_prompts_that_are_repeated_are_counted_as_often() -> None:
    for streamed in (False, True):
        assert bounded([80], prompt_logprobs=0, streamed=streamed, max_tokens=1) == 1
        for wrong in ({"prompts": [80], "copies": 2}, {"prompts": [60, 60]}, {"prompts": [101]}):
            with pytest.raises(
                RequestError, match=r"prompt: .* at most 12800 \(limits\.max_answer_bytes\)"
            ):
                bounded(**wrong, prompt_logprobs=0, streamed=streamed)  # type: ignore[arg-type]
        assert bounded([900], copies=1, streamed=streamed, max_tokens=1) == 1
        with pytest.raises(RequestError, match=r"limits\.max_answer_bytes"):
            bounded([900], copies=2, streamed=streamed)
        assert (
            bounded(
                [900], prompt_logprobs=0, truncate_prompt_tokens=50, streamed=streamed, max_tokens=1
            )
            == 1
        )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_in_threads(
        {"model": "demo", "limits": {"max_answer_bytes": 64 * LOGPROB_BYTES}}
    ) as url:
        yield url


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 8, "logprobs": 4, "max_tokens": 2}, "logprobs"),
        ({"prompt": [5] * 40, "n": 60, "echo": True, "max_tokens": 1}, "prompt"),
        ({"prompt": [5] * 40, "prompt_logprobs": 1, "max_tokens": 1}, "prompt"),
    ],
)
def test_an_answer_that_would_be_too_large_is_a_400_with_the_parameter(
    url: str, body: dict[str, Any], param: str
) -> None:
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_an_answer_that_names_no_length_ends_where_its_room_does(url: str) -> None:
    chat = {
        "messages": [{"role": "user", "content": "a"}],
        "logprobs": True,
        "top_logprobs": 7,
        "ignore_eos": True,
    }
    [choice] = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert 1 <= len(choice["logprobs"]["content"]) <= 8
