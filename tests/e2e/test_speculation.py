"""Speculation changes no token: random requests give what they give without it, whoever drafts,
under any circumstances of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from dovetail import LLMEngine, SamplingParams, Structured
from dovetail.api.clock import VirtualClock
from dovetail.api.kv_cache import KVLayout
from dovetail.front.outputs import RequestOutput
from tests.e2e import drafting
from tests.e2e.reference import checkpoint
from tests.models import hybrids
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.support import FULL, PROFILE

pytestmark = pytest.mark.usefixtures("trusted_rules")

torch.set_num_threads(1)

DRAFTERS = [*drafting.NAMES, "ngram", "suffix"]
MODEL: dict[str, Any] = {"model": "demo", "max_model_len": 96}
WAYS: dict[str, dict[str, Any]] = {
    "one step at a time": {"executor": {"max_in_flight": 1}},
    "overlap": {"executor": {"max_in_flight": 3}},
    "small memory": {"block_size": 8, "executor": {"num_pages": 12, "max_in_flight": 2}},
    "small steps": {
        "max_num_batched_tokens": 12,
        "max_num_seqs": 4,
        "executor": {"max_in_flight": 2},
    },
    "one request at a time": {"max_num_seqs": 1, "executor": {"max_in_flight": 2}},
    "no reuse": {
        "kv_cache": {"name": "prefix", "reuse": False},
        "scheduler": "vtc",
        "executor": {"max_in_flight": 2},
    },
}
EACH = 56 if FULL else 12  # requests of an engine
# 2,016 requests, or 72
PAIRS = list(product(DRAFTERS, WAYS)) if FULL else list(zip(DRAFTERS, WAYS, strict=True))
OPENINGS = (
    "ROMEO:\n",
    "the king and the queen and the king and",
    "First Citizen:\nWe are",
    "O, she doth teach the torches to burn",
    "A",
)
RULES = (
    Structured(regex="[a-f]{3,30}!"),
    Structured(choice=["the lord", "the lordship", "a lady"]),
    Structured(
        json_schema={
            "type": "object",
            "properties": {"name": {"enum": ["Romeo", "Juliet"]}},
            "required": ["name"],
        }
    ),
)


def request(seed: int) -> tuple[str, SamplingParams]:
    """Return a random prompt and parameters."""
    chance = random.Random(seed)

    def sometimes(share: float, value: Any, otherwise: Any = None) -> Any:
        return value if chance.random() < share else otherwise

    prompt = chance.choice(OPENINGS) * chance.choice((1, 1, 3, 6))
    rule = sometimes(0.15, chance.choice(RULES))
    params: dict[str, Any] = {
        "seed": seed,
        "output_kind": "final",
        "max_tokens": chance.choice((1, 2, 12, 32, 48, 48)),
        "temperature": chance.choice((0.0, 0.0, 0.5, 1.0, 2.0)),
        "n": chance.choice((1, 1, 1, 3)),
        "top_k": sometimes(0.3, chance.choice((1, 5, 40))),
        "top_p": sometimes(0.3, chance.choice((0.3, 0.9))),
        "min_p": sometimes(0.2, 0.1),
        "repetition_penalty": sometimes(0.3, chance.choice((0.8, 1.3))),
        "presence_penalty": sometimes(0.2, 1.0, 0.0),
        "frequency_penalty": sometimes(0.2, chance.choice((-0.5, 0.7)), 0.0),
        "logit_bias": sometimes(0.1, {70: 3.0, 75: -100.0}),
        "stop": sometimes(0.2, chance.choice(("th", "\n", " the ", "e,"))),
        "include_stop_str_in_output": sometimes(0.5, True, False),
        "stop_token_ids": sometimes(0.2, [chance.randrange(60, 90)]),
        "bad_words": sometimes(0.2, ["the", " and", "e"]),
        "logprobs": sometimes(0.3, chance.choice((0, 3))),
        "prompt_logprobs": sometimes(0.1, 2),
        "max_drafts": sometimes(0.3, chance.choice((0, 1, 3, 100))),
        "structured": rule,
    }
    if rule is None:
        params["ignore_eos"] = sometimes(0.5, True, False)
        params["min_tokens"] = sometimes(0.3, min(params["max_tokens"], chance.choice((1, 12))), 0)
        params["allowed_token_ids"] = sometimes(0.1, [*range(60, 110)])
    return prompt, SamplingParams(**params)


def moe(**fields: Any) -> Any:
    sizes = {
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    }
    return Qwen3MoeConfig(**{**hybrids.SHAPE, **sizes, **fields})


# Models with random weights and the demo model's vocabulary: with recurrent layers, and with
# experts
OTHERS: dict[str, Callable[..., Any]] = {**hybrids.FAMILIES, "moe": moe}
EACH_OF_OTHERS = 12 if FULL else 6
TRIPLES = (
    list(product(OTHERS, ["oracle", "alternating", "moody", "ngram"], [*WAYS, "two ranks"]))
    if FULL  # another 2,352 requests
    else [
        ("qwen3_next", "alternating", "small steps"),
        ("granite", "moody", "small memory"),
        ("moe", "oracle", "overlap"),
        ("nemotron_h", "oracle", "two ranks"),
        ("lfm2", "alternating", "small steps"),
    ]
)


def seeds_of(pair: tuple[str, str]) -> range:
    start = EACH * PAIRS.index(pair)
    return range(start, start + EACH)


def in_parts(cases: Sequence[tuple[str, ...]], each: int) -> Iterator[Any]:
    """Yield the cases with a number of their requests: a third of them in the quick profile, all in
    the others."""
    for case in cases:
        ranks = "two ranks" in case
        if PROFILE not in ("slow", "full") and not ranks:
            yield pytest.param(*case, each // 3, id="-".join(case))
        reason = (
            "starts ranks: processes that import torch" if ranks else "answers many requests twice"
        )
        yield pytest.param(
            *case, each, id="-".join((*case, "all")), marks=() if FULL else pytest.mark.slow(reason)
        )


@pytest.fixture(scope="module")
def without() -> dict[int, RequestOutput]:
    """The answers of an engine without speculation, by seed."""
    count = EACH // 3 if PROFILE == "quick" else EACH
    seeds = [seed for pair in PAIRS for seed in seeds_of(pair)[:count]]
    with LLMEngine.from_config(MODEL) as engine:
        return dict(zip(seeds, answers_of(engine, seeds), strict=True))


def answers_of(engine: LLMEngine, seeds: Sequence[int]) -> list[RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for seed in seeds:
        engine.add_request(str(seed), *request(seed))
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.core.dead is None
    engine.core.kv.check_integrity()
    assert not engine.core.kv.counts.held, "blocks that nobody holds"
    return [outputs[str(seed)] for seed in seeds]


def by_prompt(outputs: Sequence[RequestOutput]) -> drafting.Answers:
    answers: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for output in outputs:
        answers.setdefault(tuple(output.prompt_token_ids), []).extend(
            sample.token_ids for sample in output.outputs
        )
    return answers


@pytest.mark.parametrize(("drafter", "way", "count"), list(in_parts(PAIRS, EACH)))
def test_answers_are_those_without_drafts(
    without: dict[int, RequestOutput],
    drafter: str,
    way: str,
    count: int,
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting.install(site)
    monkeypatch.setattr(drafting, "ANSWERS", by_prompt(list(without.values())))
    config = {**MODEL, **WAYS[way], "executor": {"name": "free", **WAYS[way]["executor"]}}
    with LLMEngine.from_config(
        config,
        clock=VirtualClock(),
        speculation={"drafter": drafter, "max_drafts": 5, "timeout_s": 30.0},
    ) as engine:
        seeds = seeds_of((drafter, way))[:count]
        for again in (seeds, seeds[::3]):  # the second time it finds prefixes that it has computed
            for seed, output in zip(again, answers_of(engine, again), strict=True):
                require_same(output, without[seed], f"request {seed}: {request(seed)}")
        stats = engine.stats()
    if count < EACH:
        return  # too few for what follows
    assert (
        stats.draft_tokens > sum(stats.accepted_drafts) > 0 or drafter == "random"
    )  # whose drafts are only compared, if none seems to pay
    assert stats.preemptions > 0 or way != "small memory"


Plain = tuple[Path, Sequence[RequestOutput], KVLayout]
GetPlain = Callable[[tuple[str, str, str], int], Plain]


def first_of(triple: tuple[str, str, str]) -> int:
    return 1000 + EACH_OF_OTHERS * TRIPLES.index(triple)


@pytest.fixture(scope="module")
def plain() -> Iterator[GetPlain]:
    """Checkpoints of `OTHERS`, and what engines without speculation answer. In the quick profile
    all are made before the first test."""
    with ExitStack() as stack:

        @cache
        def directory_of(name: str) -> Path:
            return stack.enter_context(checkpoint(OTHERS[name](vocab_size=1024)))[0]

        @cache
        def get(triple: tuple[str, str, str], count: int) -> Plain:
            directory = directory_of(triple[0])
            seeds = range(first_of(triple), first_of(triple) + count)
            with LLMEngine.from_config(config_of(directory)) as engine:
                return directory, answers_of(engine, seeds), engine.core.kv.context.layout

        for triple in TRIPLES if PROFILE == "quick" else ():
            if "two ranks" not in triple:
                get(triple, EACH_OF_OTHERS // 3)
        yield get


def config_of(directory: Path) -> dict[str, Any]:
    return {
        "model": str(directory),
        "tokenizer": "demo",
        "dtype": "float32",
        "max_model_len": 96,
        "block_size": 8,
    }


@pytest.mark.usefixtures("ranks_in_threads")
@pytest.mark.parametrize(
    ("model", "drafter", "way", "count"), list(in_parts(TRIPLES, EACH_OF_OTHERS))
)
def test_answers_of_other_models_are_those_without_drafts(
    model: str,
    drafter: str,
    way: str,
    count: int,
    plain: GetPlain,
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting.install(site)
    triple = (model, drafter, way)
    seeds = range(first_of(triple), first_of(triple) + count)
    directory, expected, layout = plain(triple, count)
    monkeypatch.setattr(drafting, "ANSWERS", by_prompt(expected))
    config: dict[str, Any] = {
        **config_of(directory),
        **WAYS.get(way, {}),
        "executor": {"name": "free", **WAYS.get(way, {}).get("executor", {})},
    }
    if way == "two ranks":
        config["executor"] = {"name": "free-ranks", "size": 2, "device": "cpu", "max_in_flight": 2}
    elif way == "small memory":
        config["executor"]["num_pages"] = layout.most_pages(96, 96) + layout.state_pages
    with LLMEngine.from_config(
        config,
        clock=VirtualClock(),
        speculation={"drafter": drafter, "max_drafts": 5, "timeout_s": 30.0},
    ) as engine:
        for _ in range(2):  # the second time it finds prefixes that it has computed
            for seed, output, other in zip(seeds, answers_of(engine, seeds), expected, strict=True):
                require_same(output, other, f"request {seed}: {request(seed)}")
        stats = engine.stats()
    if count < EACH_OF_OTHERS:
        return  # too few for what follows
    assert sum(stats.accepted_drafts) > 0 or drafter == "ngram"
    assert stats.draft_tokens > sum(stats.accepted_drafts) or drafter in ("oracle", "ngram")
    assert stats.preemptions > 0 or way != "small memory"


def require_same(one: RequestOutput, other: RequestOutput, what: str) -> None:
    for sample, expected in zip(one.outputs, other.outputs, strict=True):
        assert list(sample.token_ids) == list(expected.token_ids), what
        assert (sample.text, sample.finish_reason, sample.stop_reason) == (
            expected.text,
            expected.finish_reason,
            expected.stop_reason,
        ), what
        assert (sample.logprobs is None) == (expected.logprobs is None), what
        for position, there in zip(sample.logprobs or (), expected.logprobs or (), strict=True):
            assert list(position) == list(there), what
            assert [entry.logprob for entry in position.values()] == pytest.approx(
                [entry.logprob for entry in there.values()], abs=1e-3
            ), what
            assert [entry.rank for entry in position.values()] == [
                entry.rank for entry in there.values()
            ], what
