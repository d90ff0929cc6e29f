"""Tiny random configs of the native architectures, as hypothesis strategies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.models.hybrids import FAMILIES

MAX_LEN = 64

_thetas = st.sampled_from([10.0, 10000.0, 1000000.0])
_factors = st.sampled_from([1.0, 1.5, 4.0, 32.0])


def ropes() -> st.SearchStrategy[dict[str, Any]]:
    """All rope types that are implemented."""
    default = st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": _thetas})
    linear = st.fixed_dictionaries(
        {"rope_type": st.just("linear"), "rope_theta": _thetas, "factor": _factors}
    )
    llama3 = st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "rope_theta": _thetas,
            "factor": _factors,
            "low_freq_factor": st.sampled_from([1.0, 1.5]),
            "high_freq_factor": st.sampled_from([2.0, 4.0]),
            "original_max_position_embeddings": st.sampled_from([8, 16, 32]),
        }
    )
    yarn = st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "rope_theta": _thetas,
            "factor": _factors,
            "original_max_position_embeddings": st.sampled_from([8, 16, 64]),
        },
        optional={
            "attention_factor": st.sampled_from([0.5, 1.0, 1.3]),
            "beta_fast": st.sampled_from([4, 32]),
            "beta_slow": st.sampled_from([0.5, 1]),
            "mscale": st.sampled_from([0.707, 1.0]),
            "mscale_all_dim": st.sampled_from([0.5, 1.0]),
            "truncate": st.booleans(),
        },
    )
    return st.one_of(default, linear, llama3, yarn)


@st.composite
def _common(draw: st.DrawFn, *, own_head_size: bool) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    head_size = draw(st.sampled_from([2, 4, 8]))
    fields = {
        "vocab_size": draw(st.sampled_from([7, 32, 61])),
        "hidden_size": heads * head_size,
        "intermediate_size": draw(st.sampled_from([4, 12, 20])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(ropes()),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if own_head_size:
        fields["head_dim"] = draw(st.sampled_from([2, 6, 8]))
    return fields


@st.composite
def qwen3_configs(draw: st.DrawFn) -> Qwen3Config:
    return Qwen3Config(
        **draw(_common(own_head_size=True)),
        attention_bias=draw(st.booleans()),
        **draw(_some_windows()),
    )


@st.composite
def qwen3_moe_configs(draw: st.DrawFn) -> Qwen3MoeConfig:
    count = draw(st.sampled_from([1, 2, 5, 8]))
    return Qwen3MoeConfig(
        **draw(_common(own_head_size=True)),
        attention_bias=draw(st.booleans()),
        num_experts=count,
        num_experts_per_tok=draw(st.integers(1, min(count, 3))),
        moe_intermediate_size=draw(st.sampled_from([4, 6, 16])),
        norm_topk_prob=draw(st.booleans()),
        decoder_sparse_step=draw(st.integers(1, 2)),
        mlp_only_layers=draw(st.sampled_from([[], [0], [1]])),
        **draw(_whole_window()),
    )


@st.composite
def latent_configs(draw: st.DrawFn) -> Any:
    """DeepSeek's two and GLM's, whose tokens go through all experts of a few groups, or of all."""
    kind = draw(st.sampled_from([DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig]))
    fields, rope = draw(_common(own_head_size=False)), draw(st.sampled_from([2, 4]))
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    groups, kept, size = draw(st.sampled_from([(1, 1, 4), (2, 1, 2), (3, 2, 2)]))
    fields |= {
        "kv_lora_rank": draw(st.sampled_from([4, 16])),
        "q_lora_rank": draw(st.sampled_from([None, 6])),
        "qk_nope_head_dim": draw(st.sampled_from([2, 6])),
        "qk_rope_head_dim": rope,
        "v_head_dim": draw(st.sampled_from([3, 8])),
        "n_routed_experts": groups * size,
        "num_experts_per_tok": kept * size,
        "n_group": groups,
        "topk_group": kept,
        "n_shared_experts": draw(st.sampled_from([1, 2])),
        "moe_intermediate_size": draw(st.sampled_from([4, 6])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }
    if fields["q_lora_rank"] is not None:
        fields["attention_bias"] = draw(st.booleans())
    if kind is Glm4MoeLiteConfig:
        fields["mlp_layer_types"] = draw(
            st.lists(
                st.sampled_from(["dense", "sparse"]),
                min_size=fields["num_hidden_layers"],
                max_size=3,
            )
        )
        fields["mlp_layer_types"] = fields["mlp_layer_types"][: fields["num_hidden_layers"]]
    else:
        fields["first_k_dense_replace"] = draw(st.integers(0, 2))
    if kind is DeepseekV2Config:
        fields["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    else:
        fields |= {"norm_topk_prob": draw(st.booleans()), "rope_interleave": draw(st.booleans())}
    return kind(**fields)


@st.composite
def glm4_moe_configs(draw: st.DrawFn) -> Glm4MoeConfig:
    fields = draw(_common(own_head_size=True)) | {"head_dim": draw(st.sampled_from([4, 8]))}
    groups, kept, size = draw(st.sampled_from([(1, 1, 4), (2, 1, 2), (3, 2, 2)]))
    fields["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": draw(st.sampled_from([0.5, 1.0])),
    }
    return Glm4MoeConfig(
        **fields,
        attention_bias=draw(st.booleans()),
        use_qk_norm=draw(st.booleans()),
        first_k_dense_replace=draw(st.integers(0, 2)),
        n_routed_experts=groups * size,
        num_experts_per_tok=kept * size,
        n_group=groups,
        topk_group=kept,
        n_shared_experts=draw(st.sampled_from([1, 2])),
        moe_intermediate_size=draw(st.sampled_from([4, 6])),
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )


@st.composite
def llama4_configs(draw: st.DrawFn) -> Llama4TextConfig:
    fields = draw(_common(own_head_size=True))
    layers = fields["num_hidden_layers"]
    kinds = st.sampled_from(["chunked_attention", "full_attention"])
    return Llama4TextConfig(
        **fields,
        intermediate_size_mlp=draw(st.sampled_from([8, 20])),
        layer_types=draw(st.lists(kinds, min_size=layers, max_size=layers)),
        no_rope_layers=[draw(st.integers(0, 1)) for _ in range(layers - 1)] + [1],
        attention_chunk_size=draw(st.sampled_from([1, 4, 10])),
        moe_layers=draw(st.sampled_from([[], [0], [0, 1, 2]])),
        num_local_experts=3,
        num_experts_per_tok=draw(st.sampled_from([1, 2])),
        use_qk_norm=draw(st.booleans()),
        attn_temperature_tuning=draw(st.booleans()),
        floor_scale=draw(st.sampled_from([3, 20])),
        attention_bias=draw(st.booleans()),
    )


@st.composite
def glm4_configs(draw: st.DrawFn) -> Glm4Config:
    """Dense, with a half, a quarter or all of each head rotating."""
    fields = draw(_common(own_head_size=True)) | {"head_dim": draw(st.sampled_from([8, 16]))}
    share = draw(st.sampled_from([0.25, 0.5, 1.0]))
    fields["rope_parameters"] = fields["rope_parameters"] | {"partial_rotary_factor": share}
    return Glm4Config(**fields, attention_bias=draw(st.booleans()))


@st.composite
def qwen2_configs(draw: st.DrawFn) -> Qwen2Config:
    return Qwen2Config(**draw(_common(own_head_size=False)), **draw(_some_windows()))


@st.composite
def llama_configs(draw: st.DrawFn) -> LlamaConfig:
    fields = draw(_common(own_head_size=draw(st.booleans())))
    return LlamaConfig(**fields, attention_bias=draw(st.booleans()), mlp_bias=draw(st.booleans()))


@st.composite
def mistral_configs(draw: st.DrawFn) -> MistralConfig:
    fields = draw(_common(own_head_size=draw(st.booleans())))
    return MistralConfig(**fields, sliding_window=draw(st.sampled_from([None, 1, 2, 5, 100])))


@st.composite
def ministral_configs(draw: st.DrawFn) -> MinistralConfig:
    fields = draw(_common(own_head_size=True))
    return MinistralConfig(
        **fields,
        sliding_window=draw(st.sampled_from([1, 3, 8])),
        layer_types=draw(_layer_types(fields)),
    )


@st.composite
def gemma_configs(draw: st.DrawFn) -> Any:
    """Gemma 2, and the text model of Gemma 3."""
    fields, caps = draw(_common(own_head_size=True)), st.sampled_from([None, 3.0, 50.0])
    fields |= {
        "layer_types": draw(_layer_types(fields)),
        "sliding_window": draw(st.sampled_from([1, 3, 8])),
        "query_pre_attn_scalar": draw(st.sampled_from([3, 8])),
        "final_logit_softcapping": draw(caps),
        "hidden_activation": draw(st.sampled_from(["gelu_pytorch_tanh", "silu"])),
        "attention_bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return Gemma2Config(**fields, attn_logit_softcapping=draw(caps))
    fields["rope_parameters"] = {
        "full_attention": fields["rope_parameters"],
        "sliding_attention": draw(ropes()),
    }
    return Gemma3TextConfig(**fields)


@st.composite
def gemma4_configs(draw: st.DrawFn) -> Any:
    """Gemma 4, text: with layers that share K and V, and without; with embeddings for each layer,
    and without."""
    fields = draw(_common(own_head_size=True))
    kinds = draw(
        st.sampled_from([["full_attention"], ["sliding_attention", "full_attention"]])
    ) * draw(st.integers(1, 2))
    partial = {
        "rope_type": "proportional",
        "rope_theta": 100.0,
        "partial_rotary_factor": draw(st.sampled_from([0.25, 0.5, 1.0])),
    }
    fields |= {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_kv_shared_layers": draw(st.integers(0, len(kinds) // 2))
        if len(kinds) != 2 or len(set(kinds)) == 1
        else 0,
        "use_double_wide_mlp": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from([1, 3, 8])),
        "global_head_dim": draw(st.sampled_from([4, 8])),
        "attention_k_eq_v": draw(st.booleans()),
        "num_global_key_value_heads": draw(st.sampled_from([None, 1])),
        "rope_parameters": {
            "full_attention": partial,
            "sliding_attention": fields["rope_parameters"],
        },
        "final_logit_softcapping": draw(st.sampled_from([None, 3.0])),
    }
    if draw(st.booleans()):
        return Gemma4UnifiedTextConfig(**fields)
    if draw(st.booleans()):
        inputs = {
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": draw(st.integers(1, 3)),
            "moe_intermediate_size": draw(st.sampled_from([4, 6])),
            "hidden_size_per_layer_input": 0,
        }
        return Gemma4TextConfig(**fields, **inputs)
    inputs = {
        "hidden_size_per_layer_input": draw(st.sampled_from([0, 4])),
        "vocab_size_per_layer_input": fields["vocab_size"] + 3,
    }
    return Gemma4TextConfig(**fields, **inputs)


@st.composite
def hybrid_configs(draw: st.DrawFn) -> Any:
    """Models with recurrent layers: all sizes that relate to each other, biases, multipliers, and
    mixtures."""
    kind = draw(st.sampled_from(list(FAMILIES)))
    if "lfm2" in kind:
        return FAMILIES[kind](**_convolutions(draw, has_experts=kind == "lfm2_moe"))
    eps = "layer_norm_epsilon" if kind == "nemotron_h" else "rms_norm_eps"
    layers = draw(
        st.permutations(
            [
                "linear_attention",
                "full_attention",
                draw(st.sampled_from(["linear_attention", "full_attention"])),
            ]
        )
    )
    fields: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": layers,
        "attention_bias": draw(st.booleans()),
    }
    fields[eps] = 1e-2  # the gated norm of a few small numbers multiplies their rounding otherwise
    if "granite" not in kind and "nemotron" not in kind and kind != "bamba":
        keys = draw(st.integers(1, 3))
        fields |= {
            "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * draw(st.integers(1, 3)),
            "linear_key_head_dim": draw(st.sampled_from([4, 16])),
            "linear_value_head_dim": draw(st.sampled_from([3, 16])),
            "linear_conv_kernel_dim": draw(st.integers(2, 5)),
            "tie_word_embeddings": draw(st.booleans()),
        }
    groups = draw(st.integers(1, 3))
    heads = groups * draw(st.sampled_from([1, 2]))
    if kind == "nemotron_h":
        del fields["attention_bias"], fields["layer_types"], fields["num_hidden_layers"]
        fields |= {
            "layers_block_type": draw(
                st.permutations(["linear_attention", "full_attention", "mlp", "moe"])
            ),
            "mamba_num_heads": heads,
            "n_groups": groups,
            "mamba_head_dim": draw(st.sampled_from([3, 8])),
            "conv_kernel": draw(st.integers(2, 5)),
            "use_bias": draw(st.booleans()),
            "use_conv_bias": draw(st.booleans()),
            "mlp_bias": draw(st.booleans()),
            "time_step_min": draw(st.sampled_from([0.001, 0.5])),
            "norm_topk_prob": draw(st.booleans()),
        }
    if kind == "bamba":
        del fields["layer_types"]
        at = [index for index, name in enumerate(layers) if name == "full_attention"]
        fields |= {"attn_layer_indices": at, "mlp_bias": draw(st.booleans())}
    if kind == "bamba" or "granite" in kind:
        fields |= {
            "mamba_n_groups": groups,
            "mamba_n_heads": draw(st.sampled_from([8, 16])) if groups != 3 else 48,
            "mamba_expand": 2 if groups != 3 else 3,
            "mamba_conv_bias": draw(st.booleans()),
            "mamba_proj_bias": draw(st.booleans()),
            "time_step_limit": draw(st.sampled_from([(0.0, float("inf")), (0.2, 0.7)])),
            "tie_word_embeddings": draw(st.booleans()),
        }
    if "granite" in kind:
        fields |= {
            "residual_multiplier": draw(st.sampled_from([0.22, 1.0, 2.0])),
            "position_embedding_type": draw(st.sampled_from([None, "rope"])),
        }
    return FAMILIES[kind](**fields)


@st.composite
def _layer_types(draw: st.DrawFn, fields: dict[str, Any]) -> list[str]:
    count = fields["num_hidden_layers"]
    return draw(
        st.lists(
            st.sampled_from(["full_attention", "sliding_attention"]), min_size=count, max_size=count
        )
    )


def _some_windows() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "use_sliding_window": st.booleans(),
            "sliding_window": st.sampled_from([1, 3, 8]),
            "max_window_layers": st.integers(0, 3),
        }
    )


def _whole_window() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"use_sliding_window": st.booleans(), "sliding_window": st.sampled_from([1, 3, 8])}
    )


def configs() -> st.SearchStrategy[Any]:
    one_window = (
        qwen3_moe_configs(),
        glm4_configs(),
        glm4_moe_configs(),
        latent_configs(),
        llama4_configs(),
        llama_configs(),
        mistral_configs(),
    )
    return st.one_of(
        *one_window,
        qwen2_configs(),
        qwen3_configs(),
        ministral_configs(),
        gemma_configs(),
        gemma4_configs(),
    )


def _convolutions(draw: st.DrawFn, *, has_experts: bool) -> dict[str, Any]:
    """Fields of models with gated convolutions."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": draw(st.permutations(["conv", "full_attention", "conv"])),
        "conv_L_cache": draw(st.integers(2, 5)),
        "conv_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "intermediate_size": draw(st.integers(8, 80)),
    }
    if has_experts:
        return fields | {
            "num_dense_layers": draw(st.integers(0, 3)),
            "use_expert_bias": draw(st.booleans()),
            "norm_topk_prob": draw(st.booleans()),
            "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
            "num_experts_per_tok": draw(st.integers(1, 6)),
        }
    return fields | {
        "block_auto_adjust_ff_dim": draw(st.booleans()),
        "block_ffn_dim_multiplier": draw(st.sampled_from([0.7, 1.0, 1.4])),
        "block_multiple_of": draw(st.sampled_from([1, 16])),
    }
