"""Tiny configs of the models with recurrent layers, one of each family, with the relations between
sizes that real ones have."""

from __future__ import annotations

from typing import Any

from transformers import (
    BambaConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

MAX_LEN = 256
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DELTA = {
    "num_hidden_layers": 4,  # every fourth has attention
    "head_dim": 16,  # of which a quarter rotates
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
ALIKE = {"shared_expert_intermediate_size": 24}  # so that it is computed with the other experts
MULTIPLIERS = {
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
PATTERN = ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "moe"]


def qwen3_next(**fields: Any) -> Any:
    return Qwen3NextConfig(
        **{
            **SHAPE,
            **DELTA,
            **EXPERTS,
            **ALIKE,
            "intermediate_size": 40,
            "mlp_only_layers": [1],
            **fields,
        }
    )


def qwen3_5(**fields: Any) -> Any:
    return Qwen3_5TextConfig(
        **{**SHAPE, **DELTA, "intermediate_size": 40, "tie_word_embeddings": True, **fields}
    )


def qwen3_5_moe(**fields: Any) -> Any:
    return Qwen3_5MoeTextConfig(**{**SHAPE, **DELTA, **EXPERTS, **fields})


def nemotron_h(**fields: Any) -> Any:
    sizes = {
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "head_dim": 8,
        "intermediate_size": 40,
    }
    experts = {
        "n_routed_experts": 6,
        "n_group": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
    }
    return NemotronHConfig(
        **{
            **SHAPE,
            **sizes,
            **experts,
            "routed_scaling_factor": 2.5,
            "layers_block_type": PATTERN,
            **fields,
        }
    )


def granite(**fields: Any) -> Any:
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    sizes = {
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "shared_intermediate_size": 20,
        "num_local_experts": 4,
        "layer_types": kinds,
    }
    return GraniteMoeHybridConfig(**{**SHAPE, **sizes, **MAMBA, **MULTIPLIERS, **fields})


def granite_dense(**fields: Any) -> Any:
    dense = {
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
        "mamba_n_groups": 2,
    }
    return granite(**{**dense, **fields})


def bamba(**fields: Any) -> Any:
    sizes = {
        "num_hidden_layers": 4,
        "intermediate_size": 40,
        "attn_layer_indices": [2],
        "mamba_n_groups": 2,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }
    return BambaConfig(**{**SHAPE, **sizes, **MAMBA, **fields})


def lfm2(**fields: Any) -> Any:
    kinds = ["conv", "full_attention", "conv", "conv"]
    sizes = {"num_hidden_layers": 4, "intermediate_size": 60, "block_multiple_of": 16}
    return Lfm2Config(**{**SHAPE, **sizes, "layer_types": kinds, **fields})


def lfm2_biased(**fields: Any) -> Any:
    other = {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
    return lfm2(**{**other, "tie_word_embeddings": False, **fields})


def lfm2_moe(**fields: Any) -> Any:
    kinds = ["conv", "full_attention", "conv", "conv"]
    sizes = {"num_hidden_layers": 4, "intermediate_size": 40, "moe_intermediate_size": 24}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 1}
    return Lfm2MoeConfig(**{**SHAPE, **sizes, **experts, "layer_types": kinds, **fields})


FAMILIES = {
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "nemotron_h": nemotron_h,
    "granite": granite,
    "granite_dense": granite_dense,
    "bamba": bamba,
    "lfm2": lfm2,
    "lfm2_biased": lfm2_biased,
    "lfm2_moe": lfm2_moe,
}
# types of transformers with recurrent layers that its own code computes
THROUGH_TRANSFORMERS = (
    "bailing_hybrid",
    "falcon_h1",
    "jamba",
    "kimi_linear",
    "lfm3",
    "mamba2",
    "olmo_hybrid",
    "zamba2",
    "zaya",
)
