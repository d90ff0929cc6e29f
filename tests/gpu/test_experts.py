"""Mixtures of experts on a GPU: the tokens of transformers in float32; with and without graphs;
half precision near float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.gpu.device import on_a_gpu, settings_for

pytestmark = on_a_gpu

CONFIG = Qwen3MoeConfig(
    vocab_size=997,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    norm_topk_prob=True,
)
LENGTHS = [1, 5, 30, 200, 17, 64]


GPT_OSS = GptOssConfig(
    vocab_size=997,
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    num_local_experts=16,
    num_experts_per_tok=4,
    sliding_window=32,
    eos_token_id=None,
)


@pytest.mark.parametrize("config", [CONFIG, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_in_float32_are_those_of_transformers(config: Any, graphs: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = random_prompts(LENGTHS, 997, 0)
    with checkpoint(config) as (directory, model):
        settings = settings_for(
            "triton", max_num_batched_tokens=130, max_model_len=1024, cuda_graphs=graphs
        )
        for prompt, tokens in zip(
            prompts,
            tokens_of(run(directory, prompts, [greedy(24)] * len(prompts), **settings)),
            strict=True,
        ):
            compare_greedy(model, prompt, tokens, Comparison())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_in_half_precision_are_the_same_in_every_run(dtype: str) -> None:
    """However steps are recorded: the order of sums is fixed."""
    prompts = random_prompts(LENGTHS, 997, 0)
    with checkpoint(CONFIG) as (directory, _):
        settings = settings_for("triton", dtype=dtype)
        runs = [
            tokens_of(run(directory, prompts, [greedy(24)] * len(prompts), **settings))
            for _ in range(2)
        ]
    assert runs[0] == runs[1]
