"""EXAONE 4 as an author outside this repository would write it, in one file: a new block made of
parts of `dovetail.nn`. Its norms follow attention and feed-forward instead of preceding them, and
layers without a window have no positions if others have one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelArch, ModelCapabilities, ParallelGroup, WeightRule
from dovetail.nn.attention import Attention, spec_of_rank
from dovetail.nn.decoder import Decoder
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.model_files import model_length
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import NO_ROPE, Rope, Rotation, rope_from_config, rope_reasons_against

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
KINDS = ("full_attention", "sliding_attention")


class Exaone4(ModelArch):
    """Serves `Exaone4ForCausalLM`."""

    architectures = ("Exaone4ForCausalLM",)
    capabilities = ModelCapabilities(tensor_parallel=True, taps=True)

    def reasons_against(self, config: Any) -> list[str]:
        if config.model_type != "exaone4":
            return [f"model_type = {config.model_type!r}, expected 'exaone4'"]
        small = [name for name in SIZES if getattr(config, name) < 1]
        if small:
            return [f"{name} must be at least 1" for name in small]
        known = {*vars(type(config)()), "model_type"}
        reasons = [
            f"{name} = {value!r} is no field of an EXAONE 4"
            for name, value in vars(config).items()
            if value and name not in known
        ]
        if config.num_attention_heads % config.num_key_value_heads:
            reasons.append("num_attention_heads is no multiple of num_key_value_heads")
        if config.hidden_size % (2 * config.num_attention_heads):
            reasons.append("hidden_size / num_attention_heads must be even")
        if config.hidden_act != "silu":
            reasons.append(f"hidden_act = {config.hidden_act!r} is not implemented")
        kinds = config.layer_types
        if len(kinds) != config.num_hidden_layers or set(kinds) - set(KINDS):
            reasons.append(f"layer_types: expected one of {', '.join(KINDS)} for each layer")
        if (window := config.sliding_window) is not None and window < 1:
            reasons.append(f"sliding_window = {window} must be at least 1")
        return reasons + rope_reasons_against(config.rope_parameters)

    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        return [spec_of_rank(spec, parallel) for spec in specs(config)]

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        vocab, hidden = config.vocab_size, config.hidden_size
        embedding = VocabParallelEmbedding(vocab, hidden, context)
        return Decoder(
            embedding,
            [Block(config, spec, context) for spec in specs(config)],
            RMSNorm(hidden, config.rms_norm_eps, context),
            LMHead(vocab, hidden, context, tied=embedding if config.tie_word_embeddings else None),
            [rope(config, spec) for spec in specs(config)],
            context.max_len or model_length(config),
        )


def specs(config: Any) -> list[LayerSpec]:
    """Return the attention layers of the whole model."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    return [
        LayerSpec(index, heads, kv_heads, size, size**-0.5, windows[kind])
        for index, kind in enumerate(config.layer_types)
    ]


def rope(config: Any, spec: LayerSpec) -> Rope:
    if config.sliding_window is not None and spec.window is None:
        return NO_ROPE
    return rope_from_config(config.rope_parameters, spec.head_size)


class Block(nn.Module):
    """Attention, then feed-forward; each reads the stream itself, and adds to it through a norm."""

    mixes = True

    def __init__(self, config: Any, spec: LayerSpec, context: BuildContext) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Attention(hidden, spec, context, qk_norm_eps=eps)
        self.attention_norm = RMSNorm(hidden, eps, context)
        self.mlp = GatedFeedForward(hidden, config.intermediate_size, context)
        self.mlp_norm = RMSNorm(hidden, eps, context)

    def add_to(
        self, residual: Residual, rotation: Rotation, wanted: torch.Tensor | None = None
    ) -> None:
        self.attention.add_to(residual, None, rotation, wanted, self.attention_norm)
        self.mlp.add_to(residual, None, self.mlp_norm)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}mlp.")
        yield from weight_rules(
            prefix,
            {
                "post_attention_layernorm": self.attention_norm,
                "post_feedforward_layernorm": self.mlp_norm,
            },
        )
