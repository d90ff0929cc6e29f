"""Tiny Hugging Face configs of an architecture and variations of them, for models with random
weights that run in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

TINY: dict[str, Any] = {
    "vocab_size": 61,  # odd: can't be split evenly
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,  # large, so that an error shows
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

OF_LATENTS: dict[str, Any] = {  # besides, for architectures with latent attention
    "num_key_value_heads": 4,  # as many as query heads
    "head_dim": 4,  # of the rotary embedding
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # of an indexer, with so many heads that no two tokens have a score of 0
    "index_topk": 7,
    "index_n_heads": 16,
    "index_head_dim": 8,
}

# besides, for architectures with embeddings for each layer, of which some share K and V
OF_LAYERS: dict[str, Any] = {
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 61,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}

# besides, for architectures with recurrent layers: those that have this field. Four ranks can split
# them
OF_STATES: dict[str, dict[str, Any]] = {
    "linear_num_key_heads": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "shared_expert_intermediate_size": 20,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "mamba_n_heads": {
        "mamba_n_heads": 8,
        "mamba_n_groups": 4,
        "mamba_d_state": 8,
        "mamba_d_conv": 3,
        "shared_intermediate_size": 20,
        "position_embedding_type": "rope",
    },
    "mamba_num_heads": {
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "linear_attention",
            "mlp",
        ],
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 4,
        "ssm_state_size": 8,
        "conv_kernel": 3,
        "layer_norm_epsilon": 1e-2,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 20,
    },
    "conv_L_cache": {"norm_eps": 1e-2, "block_multiple_of": 8, "num_dense_layers": 1},
}

OF_ENCODERS: dict[str, Any] = {  # besides, for encoders
    "layer_norm_eps": 1e-2,
    "norm_eps": 1e-2,
    "local_attention": 9,
    "pad_token_id": 1,
    "cls_token_id": None,
    "sep_token_id": None,
}

# of layers, in turn, for architectures with a rotary embedding for each
KINDS = (
    "sliding_attention",
    "full_attention",
)
# for architectures with recurrent layers, by the same fields
STATE_KINDS = {"conv_L_cache": ("conv", "full_attention")}
USUAL_STATE_KINDS = ("linear_attention", "full_attention")

VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "head_dim": 6,
        "attention_bias": True,
        "mlp_bias": True,
    },
)

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)

WITH_A_WINDOW = {
    "sliding_window": 3,
    "max_window_layers": 1,
}  # required by `use_sliding_window`, for configs that have it
WITH_THE_LEAST_WINDOW = {"sliding_window": 1, "max_window_layers": 0}

UNHEARD_OF: dict[str, Any] = {  # fields of other models, which transformers silently ignores
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "residual_multiplier": 0.5,
    "nobody_knows_this_scale": 2.0,
    "nobody_knows_this_switch": True,
    "nobody_knows_this_norm": "sandwich",
    "quantization_config": {"quant_method": "awq", "bits": 4},
}
UNHEARD_OF_ROPES: tuple[dict[str, Any], ...] = (  # fields of `rope_parameters`
    {"rope_type": "nobody_knows_this_rope", "factor": 2.0},
    {"rope_type": "axial", "factor": 2.0},
    {"rope_type": "su", "factor": 2.0},
    {"rope_type": "mrope", "mrope_section": [1, 1, 2]},
    {"rope_type": "Default", "factor": 2.0},
    {"rope_type": "default_2d"},
    {"nobody_knows_this_factor": 2.0},
)


class Change(NamedTuple):
    """A config field that differs from the tiny config, with others that it requires."""

    field: str
    fields: dict[str, Any]
    # factor for all matrices, if the field only matters for small numbers
    tiny_weights: float | None = None


def config_class(architecture: str) -> type[Any]:
    """Return transformers' config class of an architecture. Raises `AttributeError` if there is
    none."""
    import transformers

    cls: type[Any] = getattr(transformers, architecture).config_class
    return cls


@cache
def usual(architecture: str) -> Mapping[str, Any]:
    """Return the read-only fields of the config that transformers makes of an architecture without
    arguments. They are cached, since making one takes longer than a step of a tiny model."""
    return MappingProxyType(vars(config_class(architecture)()))


@cache
def plain(architecture: str) -> Mapping[str, Any]:
    """Return the read-only fields of an architecture's tiny config."""
    return MappingProxyType(vars(tiny(architecture)))


def is_of_transformers(architecture: str) -> bool:
    """Return True if transformers has a class of this name."""
    import transformers

    return hasattr(transformers, architecture)


def encodes(architecture: str) -> bool:
    """Return True for transformers' name of a model without a head over the vocabulary."""
    return architecture.endswith("Model") and not architecture.endswith("HeadModel")


def has_label_head(architecture: str) -> bool:
    return architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))


def ties(architecture: str) -> bool:
    """Return True if transformers' class for an architecture ties the head to the embedding where
    the config says so."""
    import transformers

    return bool(getattr(transformers, architecture)._tied_weights_keys)  # noqa: SLF001 (nothing public says it)


def tiny(architecture: str, **fields: Any) -> Any:
    """Return a config with TINY's values for its fields, and `fields`."""
    cls = config_class(architecture)
    known = usual(architecture)
    values = TINY | OF_ENCODERS if encodes(architecture) else TINY
    if "kv_lora_rank" in known:
        values = TINY | OF_LATENTS
        fields = {
            name: value
            for name, value in fields.items()
            if name not in ("num_key_value_heads", "head_dim")
        }
    if "num_kv_shared_layers" in known:
        shared = {
            name: value
            for name, value in OF_LAYERS.items()
            if name in known or name == "global_head_dim"
        }
        fields = {
            **fields,
            **shared,
            **{
                name: fields[name]
                for name in fields
                if name in shared and name != "num_hidden_layers"
            },
        }
    for field, own in OF_STATES.items():
        if field in known:
            values = values | {name: value for name, value in own.items() if name in known}
            fields = {
                name: value for name, value in fields.items() if name != "head_dim"
            }  # of which an even number must rotate
            layers = fields.get("num_hidden_layers", TINY["num_hidden_layers"])
            if "attn_layer_indices" in known:
                fields = {"attn_layer_indices": [*range(1, layers, 2)], **fields}
            elif "layers_block_type" not in known:
                kinds = STATE_KINDS.get(field, USUAL_STATE_KINDS)
                types = [kinds[index % 2] for index in range(layers)]
                fields = {"layer_types": types, **fields}
    if has_ropes(known.get("rope_parameters")):
        rope = fields.get("rope_parameters", TINY["rope_parameters"])
        if not has_ropes(rope):
            fields = {
                **fields,
                "rope_parameters": {KINDS[0]: {**rope, "rope_theta": 30.0}, KINDS[1]: rope},
            }
        types = [
            KINDS[index % 2]
            for index in range(fields.get("num_hidden_layers", TINY["num_hidden_layers"]))
        ]
        fields = {"layer_types": types, **fields}
    # copied, since configs change the dicts that they are given: some add how much of a head
    # rotates
    config = cls(
        **deepcopy({name: value for name, value in values.items() if name in known} | fields)
    )
    config.architectures = [architecture]
    return config


def has_ropes(parameters: Mapping[str, Any] | None) -> bool:
    """Return True for `rope_parameters` with those of each kind of layer."""
    return bool(parameters) and all(isinstance(one, Mapping) for one in (parameters or {}).values())


def with_rope(parameters: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` with `rope`; of those of each kind of layer, in one."""
    if not has_ropes(parameters):
        return dict(rope)
    kind = KINDS[1] if KINDS[1] in parameters else next(iter(parameters))
    return {**parameters, kind: dict(rope)}


def variants(architecture: str, more: tuple[Mapping[str, Any], ...]) -> list[Any]:
    """Return the configs that numbers are compared for."""
    known = set(usual(architecture))
    if not ties(architecture):
        known -= {"tie_word_embeddings"}
    if "mamba_num_heads" in known:
        known -= {"sliding_window", "attention_bias"}  # which transformers' code doesn't read
    if "index_topk" in known:
        known -= {"mlp_bias"}  # likewise
    common = [
        {name: value for name, value in fields.items() if name in known} for fields in VARIANTS
    ]
    all_fields = [*common, *_all_kinds_of_layers(architecture), *more]
    return [_rotating_pairs(architecture, fields) for fields in all_fields]


def _rotating_pairs(architecture: str, fields: Mapping[str, Any]) -> Any:
    """Return `tiny`, with its own head size where an odd number of a head of that in `fields` would
    rotate."""
    config = tiny(architecture, **fields)
    rope = getattr(config, "rope_parameters", None) or {}
    rotated = int(fields.get("head_dim", 0) * (rope.get("partial_rotary_factor") or 1.0))
    if rotated % 2 == 0:
        return config
    return tiny(architecture, **{name: fields[name] for name in fields if name != "head_dim"})


def _all_kinds_of_layers(architecture: str) -> list[dict[str, Any]]:
    """Return fields for a layer of each kind that the class's own default has and `tiny` lacks: few
    layers have the first kinds of a pattern only."""
    default = usual(architecture)
    small = plain(architecture)
    found = []
    for field in ("layer_types", "no_rope_layers"):
        kinds = list(dict.fromkeys(default.get(field) or ()))
        if not set(kinds) <= set(small.get(field) or kinds):
            window = {"sliding_window": 3} if default.get("sliding_window") else {}
            found.append({field: kinds, "num_hidden_layers": len(kinds), **window})
    return found


def choosing_all_experts(config: Any) -> Any:
    """Change a config so that each token goes through all experts of a mixture, and no choice
    depends on rounding. Returns it."""
    if hasattr(config, "num_experts_per_tok"):
        config.num_experts_per_tok = (
            getattr(config, "num_local_experts", None) or config.num_experts
        )
    return config


def changes(architecture: str) -> Iterator[Change]:
    """Another value for each field of the architecture's own config that is a switch, a number that
    isn't a size, or an activation."""
    import transformers

    common = vars(transformers.PretrainedConfig())
    own = plain(architecture)
    for field, value in own.items():
        if field in common or field.startswith("_"):
            continue
        if isinstance(value, bool):
            yield from _switched(field, own)
        elif isinstance(value, float) and not field.endswith(("dropout", "range")):
            yield Change(field, {field: value * 3 or 0.5})
            if field.endswith(("eps", "epsilon")):
                yield Change(field, {field: 1e-12}, tiny_weights=1e-5)
        elif field in ("hidden_act", "hidden_activation", "classifier_activation"):
            yield Change(field, {field: "gelu" if value != "gelu" else "silu"})
        elif field in _WINDOWS:
            yield from (Change(field, {field: window}) for window in _WINDOWS[field])
        elif field == "rope_parameters":
            yield from _roped(field, own)


_WINDOWS = {"sliding_window": (3, 1), "local_attention": (8, 2, 1)}


def _switched(field: str, own: Mapping[str, Any]) -> Iterator[Change]:
    """Yield a switch the other way, with what it needs."""
    windows = (WITH_A_WINDOW, WITH_THE_LEAST_WINDOW)
    for needed in windows if field == "use_sliding_window" else ({},):
        others = {name: number for name, number in needed.items() if name in own}
        yield Change(field, {field: not own[field], **others})


def _roped(field: str, own: Mapping[str, Any]) -> Iterator[Change]:
    value = own[field]
    plain = value[KINDS[1]] if has_ropes(value) else value
    yield from (Change("rope_type", {field: with_rope(value, rope)}) for rope in ROPES)
    if not has_ropes(value):  # transformers can't tell how many factors a kind of layer has
        yield Change("rope_type", {field: _long_rope(value, own)})
    for key, number in (("rope_theta", 1e8), ("partial_rotary_factor", 0.5)):
        yield Change(key, {field: with_rope(value, {**plain, key: number})})


def _long_rope(value: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope whose frequencies depend on the length, with a factor for each of them."""
    size = own.get("qk_rope_head_dim") or own.get("head_dim") or TINY["head_dim"]
    pairs = int(size * value.get("partial_rotary_factor", 1.0)) // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + pair / 4 for pair in range(pairs)],
        "long_factor": [2.0 + pair for pair in range(pairs)],
    }
