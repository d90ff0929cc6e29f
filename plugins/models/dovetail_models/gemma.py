"""Gemma 2 and the text models of Gemma 3: norms around every part, scaled embeddings, layers with
and without a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelPooling, WeightRule
from dovetail.nn.activation import ACTIVATIONS
from dovetail.nn.attention import Attention
from dovetail.nn.embedding import LMHead, ScaledEmbedding, VocabParallelEmbedding
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rope, Rotation, rope_from_config, rope_reasons_against
from dovetail_models.arch import (
    DecoderArch,
    head_size,
    layer_type_reasons,
    rounded,
    window_of_layer_type,
)

# of layers; each has a rotary embedding of its own
_KINDS = (
    "full_attention",
    "sliding_attention",
)


class GemmaArch(DecoderArch):
    """What Gemma 2 and its successors share."""

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
                    f"{name} = {value!r}, and {other} = {getattr(config, other)!r}, which "
                    f"transformers reads"
                )
        if config.use_bidirectional_attention not in self.causal:
            reasons.append(
                f"use_bidirectional_attention = {config.use_bidirectional_attention!r} is not "
                f"implemented: attention is causal"
            )
        for name in self.positive:
            if (value := getattr(config, name)) is not None and value <= 0:
                reasons.append(f"{name} = {value!r} must be more than 0")
        return reasons

    def window(self, config: Any, index: int) -> int | None:
        return window_of_layer_type(config, index)

    def embedding(self, config: Any, context: BuildContext) -> ScaledEmbedding:
        vocab = config.vocab_size
        hidden = config.hidden_size
        return ScaledEmbedding(vocab, hidden, context, scale=rounded(hidden**0.5, context))

    def head(
        self, config: Any, context: BuildContext, tied: VocabParallelEmbedding | None
    ) -> LMHead:
        if config.final_logit_softcapping is None:
            return super().head(config, context, tied)
        return SoftcappedHead(config, context, tied)


class Gemma2(GemmaArch):
    """Serves `Gemma2ForCausalLM`."""

    model_type = "gemma2"
    positive = (*GemmaArch.positive, "query_pre_attn_scalar", "attn_logit_softcapping")
    handled = GemmaArch.handled | {"query_pre_attn_scalar", "attn_logit_softcapping"}

    def spec(self, config: Any, index: int) -> LayerSpec:
        scale = config.query_pre_attn_scalar**-0.5
        softcap = config.attn_logit_softcapping
        return replace(super().spec(config, index), scale=scale, softcap=softcap)

    def norm(self, config: Any, context: BuildContext) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps, context, zero_centered=True)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> GemmaBlock:
        return GemmaBlock(
            self.norm(config, context),
            self.attention(config, spec, context),
            self.norm(config, context),
            self.norm(config, context),
            feed_forward(config, config.intermediate_size, context),
            self.norm(config, context),
        )

    def attention(self, config: Any, spec: LayerSpec, context: BuildContext) -> Attention:
        bias = config.attention_bias
        return Attention(config.hidden_size, spec, context, bias=bias, output_bias=bias)


class Gemma3(Gemma2):
    """Serves `Gemma3ForCausalLM`, and the text of `Gemma3ForConditionalGeneration`."""

    model_type = "gemma3_text"
    handled = Gemma2.handled | {"sliding_window_pattern"}  # transformers makes layer_types of it

    causal = (None, False, True)  # EmbeddingGemma's tokens see later ones

    def spec(self, config: Any, index: int) -> LayerSpec:
        causal = not config.use_bidirectional_attention
        return replace(super().spec(config, index), causal=causal, both_ways=causal)

    def pooling(self, config: Any) -> ModelPooling:
        pooling = super().pooling(config)
        return replace(pooling, generates=not config.use_bidirectional_attention)

    def rope_reasons(self, config: Any) -> list[str]:
        return ropes_reasons_against(config.rope_parameters)

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if config.attn_logit_softcapping is not None:
            reasons.append(
                f"attn_logit_softcapping = {config.attn_logit_softcapping}: transformers ignores "
                f"it in this model, other engines don't"
            )
        return reasons

    def rope(self, config: Any, index: int) -> Rope:
        parameters = config.rope_parameters[config.layer_types[index]]
        return rope_from_config(parameters, head_size(config))

    def attention(self, config: Any, spec: LayerSpec, context: BuildContext) -> Attention:
        return Attention(
            config.hidden_size,
            spec,
            context,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
            zero_centered=True,
        )


class NormedFeedForward(Protocol):
    """Feed-forward whose output is normed: a `torch.nn.Module`, such as `GatedFeedForward`."""

    def add_to(self, residual: Residual, norm: Norm, output_norm: Norm) -> None:
        """See `GatedFeedForward.add_to`."""

    def weights(self, prefix: str) -> Iterable[WeightRule]:
        """Return the rules for tensors whose names begin with `prefix`."""


class GemmaBlock(nn.Module):
    """Block that also norms what attention and feed-forward add to the residual stream."""

    mixes = True

    def __init__(
        self,
        input_norm: Norm,
        attention: Attention,
        attention_output_norm: Norm,
        mlp_norm: Norm,
        mlp: NormedFeedForward,
        mlp_output_norm: Norm,
    ) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.attention_output_norm = attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_output_norm = mlp_output_norm

    def add_to(
        self, residual: Residual, rotation: Rotation, wanted: torch.Tensor | None = None
    ) -> None:
        """See `Block.add_to`."""
        self.attention.add_to(
            residual, self.input_norm, rotation, wanted, self.attention_output_norm
        )
        self.mlp.add_to(residual, self.mlp_norm, self.mlp_output_norm)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix,
            {
                "input_layernorm": self.input_norm,
                "post_attention_layernorm": self.attention_output_norm,
                "pre_feedforward_layernorm": self.mlp_norm,
                "post_feedforward_layernorm": self.mlp_output_norm,
            },
        )
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}mlp.")


class SoftcappedHead(LMHead):
    """Output layer whose logits x become cap * tanh(x / cap)."""

    def __init__(
        self, config: Any, context: BuildContext, tied: VocabParallelEmbedding | None
    ) -> None:
        super().__init__(config.vocab_size, config.hidden_size, context, tied=tied)
        self.cap = config.final_logit_softcapping

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).div_(self.cap).tanh_().mul_(self.cap)


def feed_forward(config: Any, inner: int, context: BuildContext) -> GatedFeedForward:
    """Return a feed-forward with the inner size `inner`."""
    activation = config.hidden_activation
    return GatedFeedForward(config.hidden_size, inner, context, activation=activation)


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
