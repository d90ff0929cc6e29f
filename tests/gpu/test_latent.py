"""Latent attention on a GPU: the tokens of transformers in float32, with and without graphs; in
half precision the same in every run."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config

from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.gpu.device import on_a_gpu, settings_for

pytestmark = on_a_gpu

CONFIG = DeepseekV3Config(
    vocab_size=997,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=20,
    num_key_value_heads=20,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=128,
    max_position_embeddings=1024,
    eos_token_id=None,
)
LENGTHS = [1, 5, 30, 200, 17, 64]


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_in_float32_are_those_of_transformers(graphs: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = random_prompts(LENGTHS, 997, 0)
    with checkpoint(CONFIG) as (directory, model):
        settings = settings_for("triton", max_num_batched_tokens=130, cuda_graphs=graphs)
        for prompt, tokens in zip(
            prompts,
            tokens_of(run(directory, prompts, [greedy(24)] * len(prompts), **settings)),
            strict=True,
        ):
            compare_greedy(model, prompt, tokens, Comparison())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_tokens_in_bfloat16_are_the_same_in_every_run(kv_cache_dtype: str) -> None:
    prompts = random_prompts(LENGTHS, 997, 0)
    with checkpoint(CONFIG) as (directory, _):
        settings = settings_for("triton", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
        runs = [
            tokens_of(run(directory, prompts, [greedy(24)] * len(prompts), **settings))
            for _ in range(2)
        ]
    assert runs[0] == runs[1]
