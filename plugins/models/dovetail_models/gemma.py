"""Gemma 2 and the text models of Gemma 3: norms around every part, scaled embeddings, layers with and without a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.nn.activation import ACTIVATIONS
from dovetail.nn.rotary import rope_from_config, rope_reasons_against
from dovetail_models.arch import (
    ShapedArch,
    base_shape,
    head_size,
    layer_type_reasons,
    windows_by_layer_type,
)
from dovetail_models.decoder import DecoderShape

_KINDS = (
    "full_attention",
    "sliding_attention",
)  # of layers; each has a rotary embedding of its own


class GemmaArch(ShapedArch):
    """Common parts of Gemma 2 and its successors."""

    activation_field = "hidden_activation"
    activations = tuple(ACTIVATIONS)
    handled = frozenset(
        {
            *("attention_bias", "layer_types", "sliding_window", "final_logit_softcapping"),
            *("hidden_act", "sliding_window_size", "use_bidirectional_attention"),  # checked below
            "cache_implementation",  # for transformers' own generation
        }
    )
    causal: tuple[Any, ...] = (None, False)  # values of use_bidirectional_attention
    positive: tuple[str, ...] = ("final_logit_softcapping",)

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = [*super().reasons_against_fields(config), *layer_type_reasons(config)]
        for name, other in (
            ("hidden_act", "hidden_activation"),
            ("sliding_window_size", "sliding_window"),
        ):
            if (value := getattr(config, name, None)) not in (None, getattr(config, other)):
                reasons.append(
                    f"{name} = {value!r}, and {other} = {getattr(config, other)!r}, which transformers reads"
                )
        if config.use_bidirectional_attention not in self.causal:
            reasons.append(
                f"use_bidirectional_attention = {config.use_bidirectional_attention!r} is not implemented: attention is causal"
            )
        for name in self.positive:
            if (value := getattr(config, name)) is not None and value <= 0:
                reasons.append(f"{name} = {value!r} must be more than 0")
        return reasons

    def common(self, config: Any) -> dict[str, Any]:
        """Return fields of `DecoderShape`."""
        return {
            "windows": windows_by_layer_type(config),
            "qkv_bias": config.attention_bias,
            "output_bias": config.attention_bias,
            "logit_softcap": config.final_logit_softcapping,
            "activation": config.hidden_activation,
            "embedding_scale": config.hidden_size**0.5,
            "sandwich": True,
        }


class Gemma2(GemmaArch):
    """Serves `Gemma2ForCausalLM`."""

    model_type = "gemma2"
    positive = (*GemmaArch.positive, "query_pre_attn_scalar", "attn_logit_softcapping")
    handled = GemmaArch.handled | {"query_pre_attn_scalar", "attn_logit_softcapping"}

    def shape(self, config: Any) -> DecoderShape:
        return base_shape(config, **self.common(config), softcap=config.attn_logit_softcapping)

    def common(self, config: Any) -> dict[str, Any]:
        return super().common(config) | {
            "scale": config.query_pre_attn_scalar**-0.5,
            "norms_around_one": True,
        }


class Gemma3(Gemma2):
    """Serves `Gemma3ForCausalLM`, and the text of `Gemma3ForConditionalGeneration`."""

    model_type = "gemma3_text"
    handled = Gemma2.handled | {"sliding_window_pattern"}  # transformers makes layer_types of it

    def rope_reasons(self, config: Any) -> list[str]:
        return ropes_reasons_against(config.rope_parameters)

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if config.attn_logit_softcapping is not None:
            reasons.append(
                f"attn_logit_softcapping = {config.attn_logit_softcapping}: transformers ignores it in this model, other engines don't"
            )
        return reasons

    def shape(self, config: Any) -> DecoderShape:
        ropes = {
            kind: rope_from_config(config.rope_parameters[kind], head_size(config))
            for kind in set(config.layer_types)
        }
        shape = base_shape(
            config, **self.common(config), rope=ropes[config.layer_types[-1]], qk_norm=True
        )
        return replace(
            shape, layers=tuple(replace(shape, rope=ropes[kind]) for kind in config.layer_types)
        )


def ropes_reasons_against(parameters: Any) -> list[str]:
    """Return the reasons against `rope_parameters` that hold those of each kind of layer."""
    reasons = [
        f"rope_parameters: {key} is not implemented beside those of each kind of layer"
        for key in sorted(set(parameters) - set(_KINDS))
    ]
    for kind in _KINDS:
        reasons += [
            f"{kind}: {reason}" for reason in rope_reasons_against(parameters.get(kind) or {})
        ]
    return reasons
