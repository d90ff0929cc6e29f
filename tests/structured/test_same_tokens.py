"""The tokens of a request with a rule don't depend on overlap, memory or other requests; and its
other parameters still apply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from dovetail import LLM, SamplingParams, Structured
from dovetail.front.outputs import RequestOutput
from tests.rounding import rounded, roundings_of_demo
from tests.small_model import small_demo
from tests.structured.toy import ToyTrials
from tests.support import PROFILE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "tags": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 2,
            "maxItems": 4,
        },
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    },
    "required": ["name", "age", "tags", "code"],
    "additionalProperties": False,
}
PROMPTS = [
    f"{name}: the {number} of"
    for number, name in enumerate(["ROMEO", "JULIET", "KING", "Nurse", "First Citizen", "DUKE"])
]
PARAMS = [
    SamplingParams(max_tokens=120, seed=number, temperature=(0, 0.8, 1.3)[number % 3], n=1 + (number == 4), logprobs=2 if number == 1 else None,
                   presence_penalty=0.5 * (number == 2), repetition_penalty=1.2 if number == 3 else 1.0,
                   structured=None if number == 5 else Structured(json_schema=SCHEMA))
    for number in range(6)
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "no overlap": {"overlap": False},
    "small memory": {
        "block_size": 8,
        "executor": {"name": "local", "num_pages": 36},
        "max_model_len": 256,
        "overlap": True,
    },
    "one at a time": {"max_num_seqs": 1},
    "small steps": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
}

ALL = tuple(range(len(PROMPTS)))
SOME = (1, 2)
LONGER = pytest.mark.slow("six answers of up to 120 tokens, together and alone")
QUICK = ["overlap", "small memory"]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


def model_of(requests: Sequence[int]) -> str:
    return small_demo() if requests == SOME else "demo"


@cache
def alone(requests: Sequence[int]) -> list[list[tuple[int, ...]]]:
    with LLM(model_of(requests), overlap=False) as llm:
        return [
            tokens(llm.generate(PROMPTS[number], PARAMS[number], use_tqdm=False))[0]
            for number in requests
        ]


@pytest.fixture(scope="module", autouse=True)
def _some_are_answered_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # A trial changes no token, but takes a process.
        patch.setattr("dovetail.front.grammars.GrammarTrials", ToyTrials)
        if PROFILE == "quick":
            alone(SOME)
        yield


@pytest.mark.parametrize(
    ("way", "requests"),
    [
        ("overlap", SOME),
        ("small steps", SOME),
        *(pytest.param(way, ALL, marks=LONGER) for way in QUICK),
        *(pytest.param(way, ALL, marks=pytest.mark.full) for way in WAYS if way not in QUICK),
    ],
)
def test_tokens_under_a_rule_are_the_same_whatever_is_around_them(
    way: str, requests: Sequence[int]
) -> None:
    params = [PARAMS[number] for number in requests]
    with LLM(model_of(requests), **WAYS[way]) as llm:
        outputs = llm.generate([PROMPTS[number] for number in requests], params, use_tqdm=False)
        preemptions = llm.engine.stats().preemptions
    assert tokens(outputs) == alone(requests)
    assert (preemptions > 0) == (way == "small memory")
    for output, of_request in zip(outputs, params, strict=True):
        for sample in output.outputs if of_request.structured else ():
            assert sample.finish_reason == "stop"
            assert list(json.loads(sample.text)) == SCHEMA["required"]


def test_logprobs_under_a_rule_are_of_the_raw_distribution() -> None:
    """The first token's are those without the rule, though the rule forbids the likeliest."""
    with LLM("demo") as llm:
        free, ruled = (
            llm.generate(
                "ROMEO:",
                SamplingParams(max_tokens=1, temperature=0, logprobs=5, structured=rule),
                use_tqdm=False,
            )[0].outputs[0]
            for rule in (None, Structured(json_schema=SCHEMA))
        )
    assert free.token_ids != ruled.token_ids
    assert free.logprobs is not None
    assert ruled.logprobs is not None
    likeliest = sorted((entry.rank, entry.logprob) for entry in free.logprobs[0].values())[:5]
    raw = sorted(
        (entry.rank, entry.logprob) for entry in ruled.logprobs[0].values() if entry.rank <= 5
    )
    assert [rank for rank, _ in raw] == [1, 2, 3, 4, 5]
    assert [value for _, value in raw] == rounded(
        [value for _, value in likeliest], roundings_of_demo()
    )
