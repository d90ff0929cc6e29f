"""A request's tokens don't depend on memory, block size, chunks, overlap, policy or other
requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from dovetail import LLMEngine, SamplingParams
from tests.e2e.reference import greedy, run, tokens_of
from tests.models.oracle import reference
from tests.support import PROFILE, examples

pytestmark = pytest.mark.usefixtures("trusted_rules")

MAX_LEN = 96
POLICIES = ["fcfs", "priority", "vtc", "mlfq", "lpm", "edf"]


@cache
def model_dir() -> Path:
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_LEN,
    )
    directory = mkdtemp()
    reference(config, seed=5).save_pretrained(directory)
    return Path(directory)


PROMPTS = [[(i * i + j * 7) % 97 for j in range(1 + 9 * i)] for i in range(7)]
PROMPTS += [PROMPTS[6][:40], [*PROMPTS[6][:41], 3, 4], PROMPTS[6][:16]]  # prefixes in common
PARAMS = [
    greedy(20)
    if i % 2
    else SamplingParams(
        temperature=0.9,
        top_p=0.95,
        seed=i,
        max_tokens=20,
        ignore_eos=True,
        detokenize=False,
        output_kind="final",
    )
    for i in range(len(PROMPTS))
]


# those with prefixes in common, and two more
TRIED = range(5, len(PROMPTS)) if PROFILE == "quick" else range(len(PROMPTS))


@cache
def tokens_alone() -> dict[int, list[int]]:
    """Return each request's tokens when it has the engine to itself."""
    return {
        i: tokens_of(run(model_dir(), [PROMPTS[i]], [PARAMS[i]], overlap=False))[0] for i in TRIED
    }


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    return tokens_alone()


@st.composite
def circumstances(draw: st.DrawFn, policies: Sequence[str]) -> dict[str, Any]:
    block_size = draw(st.sampled_from([8, 1, 2, 16, 32]))
    enough = -(-MAX_LEN // block_size)
    return {
        "block_size": block_size,
        "max_num_batched_tokens": draw(st.sampled_from([16, 1, 5, 64, 512])),
        "max_num_seqs": draw(st.sampled_from([4, 1, 2, 16])),
        "overlap": draw(st.booleans()),
        "scheduler": draw(st.sampled_from(policies)),
        "kv_cache": {"name": "prefix", "reuse": draw(st.booleans())},
        "executor": {
            "name": "local",
            "num_pages": draw(
                st.integers(enough, 2 * enough)
            ),  # barely enough for one, to scarce: preemption is certain
            "max_in_flight": draw(st.integers(1, 3)),
        },
    }


@pytest.mark.parametrize("policies", [POLICIES[:2], POLICIES[2:4], POLICIES[4:]], ids=" or ".join)
@examples(quick=4, full=167)
@given(data=st.data(), order=st.permutations(TRIED))
def test_tokens_are_the_same_whatever_is_around_them(
    alone: dict[int, list[int]], policies: Sequence[str], data: st.DataObject, order: list[int]
) -> None:
    config = data.draw(circumstances(policies))
    outputs = run(model_dir(), [PROMPTS[i] for i in order], [PARAMS[i] for i in order], **config)
    assert tokens_of(outputs) == [alone[i] for i in order]


@pytest.mark.slow("answers many requests in scarce memory")
def test_scarce_memory_really_preempts() -> None:
    """Else the test above would say nothing about preemption."""
    with LLMEngine.from_config(
        {
            "model": str(model_dir()),
            "generation_config": "none",
            "block_size": 8,
            "executor": {"name": "local", "num_pages": 14, "max_in_flight": 2},
        }
    ) as engine:
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(index), prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.stats().preemptions > 0
        assert engine.stats().recomputed_tokens > 0


def test_samples_of_one_request_differ_and_the_first_is_the_seeded_one() -> None:
    params = SamplingParams(
        n=3,
        temperature=1.0,
        seed=11,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
        output_kind="final",
    )
    together = run(model_dir(), [PROMPTS[4]], [params])[0].outputs
    single = run(model_dir(), [PROMPTS[4]], [SamplingParams(**{**_fields(params), "n": 1})])[
        0
    ].outputs[0]
    assert [sample.index for sample in together] == [0, 1, 2]
    assert list(together[0].token_ids) == list(single.token_ids)
    assert len({tuple(sample.token_ids) for sample in together}) == 3


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {
        name: getattr(params, name)
        for name in ("temperature", "seed", "max_tokens", "ignore_eos", "detokenize", "output_kind")
    }
