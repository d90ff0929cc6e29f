"""A small config of each causal language model that transformers knows, of the type's own shape: its layer kinds, norms, gates and heads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 96,
    "d_model": 64,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "num_layers": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
}
OF_TYPES: dict[str, dict[str, Any]] = {  # instead of these sizes; and kinds of layers, where the default config lacks some that checkpoints have
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "num_kv_shared_layers": 4,  # of each kind two: what fewer layers would compute says nothing of these
        "intermediate_size": [96] * 8,
        "activation_sparsity_pattern": [0.95, *[0.0] * 7],
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "zaya": {"num_experts_per_tok": 1},
}
NEEDED = {"head_dim": 16, "num_key_value_heads": 2}  # for types whose configs leave them out though their code reads them


def tiny(model_type: str) -> Any:
    """Raises any error of transformers for a config that it can't create."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    text = default.get_text_config(decoder=True)
    known = text.to_dict()
    sizes = {key: size for key, size in SIZES.items() if known.get(key) is not None}
    if isinstance(known.get("layer_types"), list):
        kinds = list(dict.fromkeys(known["layer_types"]))
        sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    if known.get("kv_lora_rank") is not None:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= OF_TYPES.get(text.model_type, {})
    for extra in ({}, NEEDED):
        try:
            config = type(text)(**sizes, **{key: value for key, value in extra.items() if key not in sizes})
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
            return config
        except Exception:
            continue
    return type(text)(**sizes)


def random_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """Weights that make every layer matter: transformers' own start leaves some at zero."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
