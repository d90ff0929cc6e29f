"""Checkpoints of the true shapes of models that people use, with random weights: greedy tokens are
those of transformers.

Slow, and each needs several GB of memory.
"""

from __future__ import annotations

import gc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tests.e2e.reference import Comparison, compare_greedy, greedy, run, tokens_of

pytestmark = pytest.mark.full

QWEN3_06B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    tie_word_embeddings=True,
)
LLAMA_32_1B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    tie_word_embeddings=True,
)
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "kv_cache_memory": "512MiB",
}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(QWEN3_06B, torch.float32), (LLAMA_32_1B, torch.bfloat16)],
    ids=["Qwen3-0.6B", "Llama-3.2-1B"],
)
def test_greedy_tokens_are_those_of_transformers(config: Any, dtype: torch.dtype) -> None:
    """The files hold `dtype`; both load it as float32."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        for length in (1, 37, 300)
    ]
    with TemporaryDirectory() as directory:
        save_random(config, dtype, Path(directory))
        outputs = run(Path(directory), prompts, [greedy(24)] * len(prompts), **SETTINGS)
        gc.collect()
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        counts = Comparison()
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, counts)
    print(f"\n{counts.tokens} tokens compared, {counts.ties} ties")
    assert counts.ties == 0
    assert counts.tokens == 3 * 24


def save_random(config: Any, dtype: torch.dtype, directory: Path) -> None:
    """Weights that keep activations near 1 through all layers, so that logits differ and ties are
    rare; in shards, as big models come."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(
                0.0, parameter.shape[-1] ** -0.5
            )
    model.save_pretrained(directory, max_shard_size="1GB")
