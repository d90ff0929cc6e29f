"""Behaviour on a CPU, tested on a GPU: run with `pytest -m gpu tests/gpu` on a machine that has
one; skipped elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from dovetail import SamplingParams
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import MAX_LEN, random_prompts
from tests.gpu.device import SHAPES, configs, on_a_gpu, settings_for
from tests.support import examples

pytestmark = on_a_gpu

COUNTS = Comparison()
WAYS = [("triton", True), ("triton", False), ("torch", False)]  # attention, CUDA graphs

prompt_lens = st.lists(st.one_of(st.integers(1, 20), st.integers(1, 700)), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@examples(quick=24, full=200)
@given(config=configs(), lens=prompt_lens, seed=st.integers(0, 1000))
def test_greedy_tokens_in_float32_are_those_of_transformers(
    config: Any, lens: list[int], seed: int
) -> None:
    config.max_position_embeddings = MAX_LEN
    prompts = random_prompts(lens, config.vocab_size, seed)
    compared = set()
    with checkpoint(config, seed) as (directory, model):
        for attention, graphs in WAYS:
            settings = settings_for(attention, max_num_batched_tokens=300, cuda_graphs=graphs)
            for prompt, tokens in zip(
                prompts,
                tokens_of(run(directory, prompts, [greedy(16)] * len(prompts), **settings)),
                strict=True,
            ):
                if (pair := (*prompt, -1, *tokens)) not in compared:
                    compare_greedy(model, prompt, tokens, COUNTS)
                    compared.add(pair)


def test_ties_are_at_most_one_in_ten_thousand() -> None:
    """Ties among the tokens compared above; a handful of ties in a short run is already too
    many."""
    print(f"\n{COUNTS.tokens} tokens compared, {COUNTS.ties} ties")
    assert COUNTS.ties <= max(1, COUNTS.tokens // 10_000)


SMALL = Qwen3Config(
    **{**SHAPES[0].fields, "vocab_size": 997}, num_hidden_layers=3, head_dim=SHAPES[0].head_size
)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_the_same_with_and_without_graphs_overlap_chunks_and_preemption(
    temperature: float,
) -> None:
    prompts = random_prompts([1, 5, 30, 200, 17, 64], 997, 0)
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            detokenize=False,
            output_kind="final",
        )
        for i in range(6)
    ]
    with checkpoint(SMALL) as (directory, _):
        plain = settings_for("triton", overlap=False, cuda_graphs=False, max_model_len=256)
        expected = tokens_of(run(directory, prompts, params, **plain))
        changed = [
            {"cuda_graphs": True, "overlap": True},
            {"max_num_batched_tokens": 33},
            {"max_num_batched_tokens": 5},
        ]
        changed += [
            {"executor": {"name": "local", "device": "cuda", "num_pages": 20}},
            {"attention": "torch"},
            {"block_size": 64},
        ]
        for change in changed:
            assert (
                tokens_of(
                    run(
                        directory,
                        prompts,
                        params,
                        **{**plain, "cuda_graphs": True, "overlap": True, **change},
                    )
                )
                == expected
            ), change


def test_tokens_are_the_same_when_large_steps_are_recorded() -> None:
    """A small model's steps of some thousand tokens are one graph, too, with prompts whole and in
    chunks."""
    prompts = random_prompts([3000, 40, 2500, 1, 700], 997, 0)
    with checkpoint(SMALL) as (directory, _):
        plain = settings_for(
            "triton",
            overlap=False,
            cuda_graphs=False,
            max_model_len=4096,
            max_num_batched_tokens=6300,
        )
        expected = tokens_of(run(directory, prompts, [greedy(16)] * len(prompts), **plain))
        for budget in (6300, 2200):
            recorded = {
                **plain,
                "cuda_graphs": True,
                "overlap": True,
                "max_num_batched_tokens": budget,
            }
            assert (
                tokens_of(run(directory, prompts, [greedy(16)] * len(prompts), **recorded))
                == expected
            ), budget
