"""Mixtures of experts generate the tokens that transformers does, and those that can't be served
are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dovetail.errors import DovetailError
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.support import examples

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}


@given(
    normalize=st.booleans(),
    step=st.integers(1, 2),
    dense=st.sampled_from([[], [0], [1]]),
    lens=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
@examples(quick=6, full=100)
def test_greedy_tokens_of_a_ragged_batch_are_those_of_transformers(
    normalize: bool, step: int, dense: list[int], lens: list[int], seed: int
) -> None:
    config = Qwen3MoeConfig(
        **TINY, norm_topk_prob=normalize, decoder_sparse_step=step, mlp_only_layers=dense
    )
    prompts = random_prompts(lens, 61, seed)
    with checkpoint(config, seed) as (directory, model):
        outputs = run(directory, prompts, [greedy(12)] * len(prompts), max_num_batched_tokens=90)
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, Comparison())


GPT_OSS: dict[str, Any] = {
    **{
        name: TINY[name]
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
    },
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "swiglu_limit": 0.5,
    "eos_token_id": None,
}


@given(lens=st.lists(st.integers(1, 200), min_size=1, max_size=4), seed=st.integers(0, 1000))
@examples(quick=4, full=60)
def test_greedy_tokens_of_gpt_oss_are_those_of_transformers(lens: list[int], seed: int) -> None:
    prompts = random_prompts(lens, 61, seed)
    with checkpoint(GptOssConfig(**GPT_OSS), seed) as (directory, model):
        outputs = run(directory, prompts, [greedy(12)] * len(prompts), max_num_batched_tokens=90)
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, Comparison())


def pack_experts(directory: Path, model: Any, seed: int) -> None:
    """Replace the experts of a gpt-oss checkpoint by random ones in MXFP4, and those of
    transformers' `model` by what it makes of them."""
    torch.manual_seed(seed)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight, whole_name = (
                getattr(layer.mlp.experts, name),
                f"model.layers.{index}.mlp.experts.{name}",
            )
            count, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (count, outputs, inputs // 32), dtype=torch.uint8)
            weight.data = convert_moe_packed_tensors(
                blocks, scales, dtype=torch.float32
            ).contiguous()
            del tensors[whole_name]
            tensors |= {f"{whole_name}_blocks": blocks, f"{whole_name}_scales": scales}
    save_file(tensors, path, {"format": "pt"})
    quantized = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "lm_head",
        ],
    }
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))


@pytest.mark.slow("makes several engines or many tokens")
def test_greedy_tokens_of_gpt_oss_in_mxfp4_are_those_of_weights_that_transformers_dequantizes() -> (
    None
):
    prompts = random_prompts([1, 40, 7], 61, 0)
    with checkpoint(GptOssConfig(**GPT_OSS), 0) as (directory, model):
        pack_experts(directory, model, 0)
        for prompt, tokens in zip(
            prompts, tokens_of(run(directory, prompts, [greedy(12)] * len(prompts))), strict=True
        ):
            compare_greedy(model, prompt, tokens, Comparison())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok .9. is more than num_experts .8."),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0 must be at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (
            {"num_local_experts": 9},
            r"lacks 6 tensors .model.layers.0.mlp.experts.8.down_proj.weight",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_rejected_by_name(
    fields: dict[str, Any], said: str
) -> None:
    with checkpoint(Qwen3MoeConfig(**TINY)) as (directory, _):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        with pytest.raises(DovetailError, match=said):
            run(directory, [[1]], [greedy(1)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "model.layers.1.mlp.experts.5.up_proj.weight",
            "lacks 1 tensor .model.layers.1.mlp.experts.5.up_proj.weight",
        ),
        (
            "model.layers.1.mlp.gate.weight",
            r"tensor model.layers.1.mlp.gate.weight: expected shape \[8, 32\], found \[7, 32\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_rejected_by_name(
    name: str, said: str
) -> None:
    with checkpoint(Qwen3MoeConfig(**TINY)) as (directory, _):
        path = directory / "model.safetensors"
        tensors = load_file(path)
        tensor = tensors.pop(name)
        save_file(
            tensors if "experts" in name else tensors | {name: tensor[:7].clone()},
            path,
            {"format": "pt"},
        )
        with pytest.raises(DovetailError, match=said):
            run(directory, [[1]], [greedy(1)])
