"""Small configs of the types that transformers knows, of each type's own shape: its layer kinds,
norms, gates and heads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

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
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16}
THREE: dict[str, Any] = {"num_hidden_layers": 3}
# instead of these sizes; and kinds of layers, where the default config lacks some that checkpoints
# have
OF_TYPES: dict[str, dict[str, Any]] = {
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        # of each kind two: what fewer layers would compute says nothing of these
        "num_kv_shared_layers": 4,
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
    # as published ones
    "deberta-v2": {
        "relative_attention": True,
        "share_att_key": True,
        "position_biased_input": False,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "max_relative_positions": -1,
    },
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "mpnet": {"pad_token_id": 1, "bos_token_id": 0},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "bailing_hybrid": {
        "head_dim": 32,  # of linear attention
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        **MAMBA,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
        "window_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 80},
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, **THREE},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen3_vl_moe_text": {
        "moe_intermediate_size": 24
    },  # of a square weight nobody can tell whether it is transposed
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], **THREE},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 16,
        **THREE,
    },
    "zaya": {"num_experts_per_tok": 1},
}
SECTIONS: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [4, 2, 2],
}  # of heads of 16, by three positions
OF_TYPES |= {kind: {"rope_parameters": SECTIONS} for kind in ("qwen2_vl_text", "qwen2_5_vl_text")}
OF_TYPES |= {
    kind: {
        "rope_parameters": {**SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    }
    for kind in ("glm4v_text", "glm4v_moe_text", "glm_ocr_text")
}
PLACEHOLDER = SIZES["vocab_size"] - 1  # the token that stands for images

BESIDE_TEXT: dict[str, Any] = {  # the sizes of vision and audio models
    "hidden_size": 32,
    "embed_dim": 32,
    "d_model": 32,
    "depth": 1,
    "num_heads": 2,
    "num_layers": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 64,
    "out_hidden_size": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "deepstack_visual_indexes": [],
    "fullatt_block_indexes": [0],
}
NEEDED = {
    "head_dim": 16,
    "num_key_value_heads": 2,
}  # for types whose configs leave them out though their code reads them


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
            config = type(text)(
                **sizes, **{key: value for key, value in extra.items() if key not in sizes}
            )
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
            return config
        except Exception:
            continue
    return type(text)(**sizes)


def tiny_whole(model_type: str) -> Any:
    """Return the config of a small model with all its parts, such as a vision model beside the text
    model. Raises any error of transformers for one that it can't create."""
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config(decoder=True)
    if text is default:
        return tiny(model_type)
    fields: dict[str, Any] = {}
    for name, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            fields[name] = _text_fields(text) if part is text else _known(part, BESIDE_TEXT)
            fields[name]["model_type"] = part.model_type
    for name, value in default.to_dict().items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            fields[name] = min(value, PLACEHOLDER)
    return type(default)(**fields)


def _known(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return those of `sizes` that a config of this class has, as floats and lists where it has
    these."""
    known = config.to_dict()
    return {
        key: size
        for key, size in sizes.items()
        if known.get(key) is not None and isinstance(size, list) == isinstance(known[key], list)
    }


def _text_fields(text: Any) -> dict[str, Any]:
    fields = _known(text, SIZES)
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if kinds:
        fields["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        fields["num_hidden_layers"] = len(fields["layer_types"])
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        fields["rope_parameters"] = {**rope, "mrope_section": _sections(rope)}
    return fields | OF_TYPES.get(text.model_type, {})


def _sections(rope: dict[str, Any]) -> list[int]:
    """Return how many of the pairs of a head of 16 rotate by each of three positions."""
    pairs = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def random_model(config: Any, seed: int = 0, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Weights that make every layer matter: transformers' own start leaves some at zero."""
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
