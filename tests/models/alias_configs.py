"""Configs of checkpoints that bring code of their own, as they are published, and the types of
transformers that compute the same: in the words of the models' papers and code, apart from the
product."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from tests.models.tiny_configs import random_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GATED = {**SIZES, "hidden_act": "silu", "rms_norm_eps": 1e-5}
FEW = {"num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Alias:
    """`config`: as published. `same`: the type of transformers, and the fields of its config."""

    config: Mapping[str, Any]
    same: str
    fields: Mapping[str, Any]


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
HEAD = 1 / math.sqrt(SIZES["hidden_size"] / SIZES["num_attention_heads"])
FALCON = {
    "hidden_size": 64,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_norm_epsilon": 1e-5,
    "bias": False,
    "alibi": False,
}
ALIASES: Mapping[str, Alias] = {  # by architecture
    "AquilaModel": Alias({**GATED, "model_type": "aquila"}, "llama", GATED),
    "AquilaForCausalLM": Alias({**GATED, **FEW, "model_type": "aquila"}, "llama", GATED | FEW),
    "XverseForCausalLM": Alias(
        {**GATED, "model_type": "xverse", "max_tokenizer_truncation": 200}, "llama", GATED
    ),
    "InternLMForCausalLM": Alias(
        {**GATED, "model_type": "internlm", "bias": True}, "llama", GATED | {"attention_bias": True}
    ),
    "PanguEmbeddedForCausalLM": Alias(
        {**GATED, **FEW, "model_type": "PanguEmbedded", "bias": True, "rope_theta": 5000.0},
        "llama",
        {
            **GATED,
            **FEW,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "MiMoForCausalLM": Alias(
        {
            **GATED,
            **FEW,
            "model_type": "mimo",
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
            "head_dim": 16,
        },
        "qwen2",
        GATED | FEW,
    ),
    "MiniCPMForCausalLM": Alias(
        {
            **GATED,
            "model_type": "minicpm",
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 16,
        },
        "granite",
        {
            **GATED,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / math.sqrt(2),
            "logits_scaling": 4.0,
            "attention_multiplier": HEAD,
        },
    ),
    "TeleFLMForCausalLM": Alias(
        {
            **GATED,
            "model_type": "TeleFLM",
            "use_mup": True,
            "input_mult": 1.5,
            "output_mult": 3.0,
            "mup_scale_factor": 6.0,
        },
        "granite",
        {
            **GATED,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 1.0,
            "logits_scaling": 2.0,
            "attention_multiplier": HEAD,
        },
    ),
    "OrionForCausalLM": Alias(
        {**GATED, **FEW, "model_type": "orion", "attention_bias": False},
        "stablelm",
        {
            **SIZES,
            **FEW,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "StableLMEpochForCausalLM": Alias(
        {
            **SIZES,
            **FEW,
            "hidden_act": "silu",
            "model_type": "stablelm_epoch",
            "norm_eps": 1e-5,
            "rope_pct": 0.5,
            "rotary_scaling_factor": 1.0,
            "use_qkv_bias": True,
        },
        "stablelm",
        {
            **SIZES,
            **FEW,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "RWForCausalLM": Alias(
        {
            **FALCON,
            "model_type": "RefinedWeb",
            "n_layer": 2,
            "n_head": 4,
            "n_head_kv": 2,
            "parallel_attn": True,
        },
        "falcon",
        {
            **FALCON,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "parallel_attn": True,
        },
    ),
    "LLaMAForCausalLM": Alias({**GATED, "model_type": "llama"}, "llama", GATED),
    "GritLM": Alias({**GATED, **FEW, "model_type": "mistral"}, "mistral", GATED | FEW),
}
# of parts that aren't served, in published checkpoints
OTHER_TENSORS = {"MiMoForCausalLM": {"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128)}}


def save_alias(name: str, directory: Path) -> Any:
    """Save a small checkpoint as it is published. Returns transformers' model that computes the
    same."""
    alias = ALIASES[name]
    reference = random_model(CONFIG_MAPPING[alias.same](**alias.fields))
    reference.save_pretrained(directory)
    if extra := OTHER_TENSORS.get(name):
        tensors = load_file(directory / "model.safetensors")
        save_file(tensors | extra, directory / "model.safetensors", {"format": "pt"})
    said = {**alias.config, "architectures": [name], "torch_dtype": "float32", "use_cache": True}
    (directory / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return reference
