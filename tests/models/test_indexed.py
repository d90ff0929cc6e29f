"""Models whose queries attend to the tokens that an indexer selects: what they compute in an
engine, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV32Config

from dovetail.api.attention import AttentionContext
from dovetail.api.component import NoOptions
from dovetail.nn.parallel import SINGLE
from dovetail.testing.suites.model_configs import tiny
from dovetail_attention.flash import FlashAttention
from dovetail_attention.sdpa import TorchAttention
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.executors.rank_threads import ranks_as_threads
from tests.models.oracle import arch_of, run_reference
from tests.models.oracle import run as forward
from tests.models.test_decoders import a_pair, assert_close, some_tokens
from tests.support import examples

TOP_K = 7  # of `tiny`
SHARED = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}


def deepseek(**fields: Any) -> Any:
    return tiny("DeepseekV32ForCausalLM", max_position_embeddings=256, **fields)


def glm(**fields: Any) -> Any:
    return tiny("GlmMoeDsaForCausalLM", max_position_embeddings=256, **(SHARED | fields))


@given(
    family=st.sampled_from([deepseek, glm]),
    fields=st.fixed_dictionaries(
        {
            "index_topk": st.sampled_from([1, 2, TOP_K, 40]),
            "attention_bias": st.booleans(),
            "n_group": st.sampled_from([1, 2]),
        }
    ),
    length=st.integers(1, 64),
    cut=st.integers(0, 64),
    seed=st.integers(0, 99),
)
@examples(quick=6, full=500)
def test_hidden_states_and_logits_equal_transformers_in_chunks(
    family: Any, fields: dict[str, Any], length: int, cut: int, seed: int
) -> None:
    config = family(**fields)
    theirs, ours = a_pair(config, seed)
    tokens = some_tokens(config, length, seed)
    chunks = tuple(part for part in (min(cut, length), length - min(cut, length)) if part)
    expected = run_reference(theirs, tokens)
    for mine, of_theirs in zip(forward(ours, tokens, chunks), expected, strict=True):
        assert_close(mine, of_theirs)


WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"max_num_batched_tokens": 30},
    "preempted": {"executor": {"name": "local", "num_pages": 14}, "max_model_len": 144},
    "on two ranks": {"executor": {"name": "tensor", "size": 2, "device": "cpu"}},
}


@pytest.mark.slow("makes several engines or many tokens")
@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(deepseek, "in chunks", marks=pytest.mark.full),
        (glm, "in chunks"),
        (deepseek, "preempted"),
        pytest.param(glm, "preempted", marks=pytest.mark.full),
        pytest.param(deepseek, "on two ranks", marks=pytest.mark.full),
        (glm, "on two ranks"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(family: Any, way: str) -> None:
    """Prompts are shorter and longer than what is selected; two begin alike, and the longest comes
    again, so that its pages are found in the prefix cache."""
    prompts = random_prompts([1, TOP_K - 1, 120, 50], 61, 0)
    prompts += [prompts[2][:80] + prompts[3], prompts[2]]
    with checkpoint(family()) as (directory, model), ranks_as_threads():
        outputs = run(directory, prompts, [greedy(12)] * len(prompts), **WAYS[way])
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, Comparison())
    assert sum(output.num_cached_tokens or 0 for output in outputs) >= 80
    assert bool(sum(output.metrics.preemptions for output in outputs)) == (way == "preempted")


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        (deepseek, {"index_topk": 0}, "index_topk"),
        (deepseek, {"index_head_dim": 2}, "index_head_dim"),
        (deepseek, {"layer_types": ["indexed_attention", "full_attention"]}, "layer_types"),
        (deepseek, {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        (deepseek, {"indexer_types": ["full", "shared"]}, "indexer_types"),
        (glm, {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        (glm, {"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
        (glm, {"indexer_types": ["full", "shared"]}, "indexer_types"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    family: Any, fields: dict[str, Any], named: str
) -> None:
    config = family(**fields)
    assert any(named in reason for reason in arch_of(config).reasons_against(config))


def test_a_backend_without_the_capability_refuses_such_layers() -> None:
    config = deepseek()
    layers = arch_of(config).layer_specs(config, SINGLE)
    reasons = FlashAttention.reasons_against(AttentionContext("cuda:0", "bfloat16", 256), layers)
    assert any("indexer" in reason for reason in reasons)


def test_a_token_takes_its_latent_and_its_index_key() -> None:
    config = DeepseekV32Config()
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "bfloat16", 16))
    layers = arch_of(config).layer_specs(config, SINGLE)
    taken = sum(sum(backend.tensor_bytes(spec, 16)) for spec in layers)
    assert taken == 16 * 61 * (576 + 128) * 2
