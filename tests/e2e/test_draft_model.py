"""The drafter `model`: a small model drafts, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.clock import VirtualClock
from dovetail.engine.stats import EngineStats
from dovetail.errors import ConfigError, UnsupportedError
from tests.e2e import drafting
from tests.e2e.reference import checkpoint
from tests.e2e.test_speculation import MODEL, WAYS, request, require_same
from tests.e2e.test_speculation import answers_of as all_answers_of
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.support import FULL

SEEDS = range(500, 512 if FULL else 508)
MODEL_DRAFTER = {"name": "model", "model": "demo-draft"}


@cache
def without() -> list[Any]:
    with LLMEngine.from_config(MODEL) as engine:
        return all_answers_of(engine, SEEDS)


def drafting_engine(
    way: str = "one step at a time", drafter: Any = MODEL_DRAFTER, **changes: Any
) -> LLMEngine:
    config = {
        **MODEL,
        **WAYS[way],
        "executor": {"name": "free", **WAYS[way]["executor"]},
        **changes,
    }
    return LLMEngine.from_config(
        config, clock=VirtualClock(), speculation={"drafter": drafter, "max_drafts": 4}
    )


@pytest.mark.parametrize("way", ["overlap", "small memory", "small steps"])
@pytest.mark.slow("makes several engines or many tokens")
def test_answers_are_those_without_drafts(way: str, site: Site) -> None:  # noqa: F811
    """Random requests: temperatures, filters, penalties, stop strings, grammars, several samples,
    preemptions, chunks, prefixes found."""
    drafting.install(site)
    with drafting_engine(way) as engine:
        for _ in range(2):  # the second time it finds prefixes that it has computed
            for seed, output, expected in zip(
                SEEDS, all_answers_of(engine, SEEDS), without(), strict=True
            ):
                require_same(output, expected, f"request {seed}: {request(seed)}")
        stats = engine.stats()
    assert stats.draft_tokens > sum(stats.accepted_drafts) > 0
    assert stats.preemptions > 0 or way != "small memory"


def generate(engine: LLMEngine, prompt: str, **params: Any) -> EngineStats:
    """Return the stats after a request."""
    engine.add_request(
        "r",
        prompt,
        SamplingParams(seed=3, max_tokens=40, ignore_eos=True, output_kind="final", **params),
    )
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    return replace(stats, accepted_drafts=[*stats.accepted_drafts])  # later steps change the list


@pytest.mark.slow("makes several engines or many tokens")
def test_as_many_drafts_are_accepted_after_a_prefix_hit(site: Site) -> None:  # noqa: F811
    drafting.install(site)
    prompt = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak"
    with drafting_engine() as engine:
        first = generate(engine, prompt)
        second = generate(engine, prompt)
    assert second.cached_tokens > first.cached_tokens == 0
    assert [
        two - one for one, two in zip(first.accepted_drafts, second.accepted_drafts, strict=True)
    ] == list(first.accepted_drafts)


@pytest.mark.slow("makes several engines or many tokens")
def test_the_model_as_its_own_draft_model_is_always_right(site: Site) -> None:  # noqa: F811
    drafting.install(site)
    with drafting_engine(drafter={"name": "model", "model": "demo"}) as engine:
        stats = generate(engine, "ROMEO:\n", temperature=1.0)
    assert stats.draft_tokens == sum(stats.accepted_drafts) >= 31


@pytest.mark.slow("writes long answers with and without drafts")
def test_the_bundled_draft_model_saves_half_of_the_steps(site: Site) -> None:  # noqa: F811
    drafting.install(site)
    with drafting_engine() as engine:
        stats = generate(engine, "ROMEO:\n", temperature=0.8)
    assert 1 + sum(stats.accepted_drafts) / stats.draft_rows > 2


def test_draft_models_that_do_not_fit_are_refused() -> None:
    from transformers import Qwen3Config

    def small(**changes: Any) -> Qwen3Config:
        shape = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        return Qwen3Config(**{**shape, "head_dim": 16, "vocab_size": 1024, **changes})

    for model, says in (
        (small(vocab_size=1000), "it has a vocabulary of 1000 tokens, and the model one of 1024"),
        (
            small(max_position_embeddings=64),
            "max_model_len: 96 tokens is more than this model's own length of 64",
        ),
    ):
        with (
            checkpoint(model) as (directory, _),
            pytest.raises(UnsupportedError, match=f"draft model {directory}: {says}"),
        ):
            LLMEngine.from_config(
                MODEL, speculation={"drafter": {"name": "model", "model": str(directory)}}
            )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "speculation.drafter.*model"),
        (
            {"model": "no such model"},
            "speculation.drafter: sought where models are: .*bundled models",
        ),
    ],
)
def test_a_draft_model_must_be_named_and_exist(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLMEngine.from_config(MODEL, speculation={"drafter": {"name": "model", **options}})
