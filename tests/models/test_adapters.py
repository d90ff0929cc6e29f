"""Adapters of each linear layer that a family of models has besides the usual ones, as merged
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dovetail import LLM, LoRARequest, SamplingParams
from tests.adapters import config_of, weights_of, write_adapter

PROMPTS = [[5, 17, 20, 31, 8, 40], [9, 3, 3, 60]]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SHARED = {
    "moe_intermediate_size": 16,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "layer_types": ["full_attention", "full_attention"],
}
FAMILIES = {
    "DeepseekV3ForCausalLM": (
        LATENT,
        ("kv_b_proj", "kv_a_proj_with_mqa", "q_proj", "o_proj", "shared_experts.up_proj"),
    ),
    "DeepseekV2ForCausalLM": ({**LATENT, "q_lora_rank": 12}, ("kv_b_proj", "q_b_proj")),
    "LlamaForCausalLM": (
        {"num_key_value_heads": 2, "tie_word_embeddings": False},
        ("lm_head", "q_proj"),
    ),
    "Qwen3ForCausalLM": (
        {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
        ("lm_head",),
    ),
    "Qwen3NextForCausalLM": (
        SHARED,
        ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    ),
}


@pytest.mark.slow("makes a model of each family, in transformers and here")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_changes_answers_as_merged_weights_do(family: str, tmp_path: Path) -> None:
    fields, targets = FAMILIES[family]
    kind = getattr(transformers, family)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES, **fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.15)
    model.save_pretrained(tmp_path / "model")
    linear = {
        name: one
        for name, one in model.named_modules()
        if name.endswith(targets) and isinstance(one, torch.nn.Linear)
    }
    assert {target for target in targets if any(name.endswith(target) for name in linear)} == set(
        targets
    )
    weights = {
        name: 0.3 * array
        for name, array in weights_of(
            {name: (one.in_features, one.out_features) for name, one in linear.items()}
        ).items()
    }
    ends = sorted({name.rpartition(".")[2] for name in linear})
    # of rank 4 and alpha 8
    folder = write_adapter(tmp_path / "adapter", config_of(target_modules=ends), weights)
    params = SamplingParams(
        temperature=0, max_tokens=5, prompt_logprobs=0, logprobs=0, detokenize=False
    )
    with LLM(
        str(tmp_path / "model"),
        dtype="float32",
        enable_lora=True,
        max_model_len=32,
        num_kvcache_blocks=20,
    ) as llm:
        adapter = LoRARequest("x", 1, str(folder))
        found = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=[adapter, None])
        plain = llm.generate(PROMPTS, params, use_tqdm=False)
    # it may be the embedding's
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for name, module in linear.items():
        a, b = (
            torch.tensor(weights[f"base_model.model.{name}.lora_{side}.weight"]) for side in "AB"
        )
        module.weight.data += 2 * b @ a
    expected = logprobs(model, PROMPTS[0], list(found[0].outputs[0].token_ids))
    np.testing.assert_allclose(told(found[0]), expected, atol=1e-3)
    assert np.abs(np.array(told(found[0])[:5]) - told(plain[0])[:5]).max() > 0.01
    np.testing.assert_allclose(told(found[1]), told(plain[1]), atol=1e-5)


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of all tokens but the first."""
    tokens = torch.tensor([[*prompt, *answer]])
    each = model(tokens).logits[0].log_softmax(-1)
    return [float(each[place, token]) for place, token in enumerate(tokens[0, 1:].tolist())]


def told(output: Any) -> list[float]:
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True)]
