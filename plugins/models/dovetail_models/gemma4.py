"""The dense text models of Gemma 4: heads by kind of layer, later layers that share K and V of earlier ones, embeddings for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.activation import ACTIVATIONS
from dovetail.nn.embedding import VocabParallelEmbedding
from dovetail.nn.linear import ReplicatedLinear
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import whole
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation, rope_from_config
from dovetail_models.arch import layer_type_reasons, shape_fields, windows_by_layer_type
from dovetail_models.decoder import Block, Decoder, DecoderShape, rounded
from dovetail_models.gemma import GemmaArch, ropes_reasons_against

_BY_LAYER = {"head_dim", "num_key_value_heads"}  # what a config may hold for single layers


@dataclass(frozen=True, slots=True)
class Gemma4Shape(DecoderShape):
    input_size: int = 0  # of the embedding that a token has for each layer; 0: none
    input_vocab_size: int = 0


class Gemma4(GemmaArch):
    """Serves `Gemma4ForCausalLM`, and the text of `Gemma4ForConditionalGeneration`, without experts."""

    model_type = "gemma4_text"
    handled = GemmaArch.handled | {
        *("vocab_size_per_layer_input", "hidden_size_per_layer_input", "attention_k_eq_v"),
        *("num_kv_shared_layers", "use_double_wide_mlp"),
        "enable_moe_block",  # checked below; without it the next three aren't read
        *("num_experts", "top_k_experts", "moe_intermediate_size"),
        *("per_layer_config", "_heterogeneity_spec"),  # made of global_head_dim; checked below
    }
    causal = (None, "vision")  # text is causal with the latter, too

    def layer_configs(self, config: Any) -> list[Any]:
        return list(config.per_layer_config)

    def rope_reasons(self, config: Any) -> list[str]:
        return ropes_reasons_against(config.rope_parameters)

    def reasons_against_fields(self, config: Any) -> list[str]:
        if reasons := layer_type_reasons(config):
            return reasons
        reasons = super().reasons_against_fields(config)
        if getattr(config, "enable_moe_block", False):
            reasons.append(
                "enable_moe_block = True: experts of Gemma 4 are not implemented; `component: transformers` serves them"
            )
        for index, layer in enumerate(config.per_layer_config):
            own = {
                key
                for key, value in vars(layer).items()
                if key != "skip" and value != vars(config).get(key)
            } - _BY_LAYER
            if own or getattr(layer, "skip", None):
                reasons.append(
                    f"per_layer_config: {', '.join(sorted(own)) or 'skip'} of layer {index} is not implemented"
                )
        if _input_size(config) and config.vocab_size_per_layer_input < config.vocab_size:
            reasons.append(
                f"vocab_size_per_layer_input = {config.vocab_size_per_layer_input} is less than vocab_size ({config.vocab_size})"
            )
        shared, kinds = config.num_kv_shared_layers, config.layer_types
        if not 0 <= shared < len(kinds) or set(kinds[len(kinds) - shared :]) - set(
            kinds[: len(kinds) - shared]
        ):
            reasons.append(
                f"num_kv_shared_layers = {shared}: no earlier layer of the same kind has K and V for each of these"
            )
        return reasons

    def shape(self, config: Any) -> Gemma4Shape:
        per_layer, kinds = list(config.per_layer_config), config.layer_types
        ropes = [
            rope_from_config(config.rope_parameters[kind], layer.head_dim)
            for kind, layer in zip(kinds, per_layer, strict=True)
        ]
        special = {
            "windows": windows_by_layer_type(config),
            "rope": ropes[-1],
            "scale": 1.0,
            "qk_norm": True,
            "v_norm": True,
        }
        shape = Gemma4Shape(
            **shape_fields(per_layer[-1], **(self.common(config) | special)),
            input_size=_input_size(config),
            input_vocab_size=getattr(config, "vocab_size_per_layer_input", 0),
        )
        first_shared = len(kinds) - config.num_kv_shared_layers
        layers = []
        for index, (kind, layer, rope) in enumerate(zip(kinds, per_layer, ropes, strict=True)):
            shares = (
                None
                if index < first_shared
                else max(other for other in range(first_shared) if kinds[other] == kind)
            )
            layers.append(
                replace(
                    shape,
                    rope=rope,
                    head_size=layer.head_dim,
                    kv_heads=layer.num_key_value_heads,
                    v_is_k=config.attention_k_eq_v and kind == "full_attention",
                    shares=shares,
                    intermediate_size=config.intermediate_size
                    * (2 if config.use_double_wide_mlp and shares is not None else 1),
                )
            )
        return replace(shape, layers=tuple(layers))

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        return Gemma4Decoder(self.shape(config), context)


class Gemma4Unified(Gemma4):
    """Serves `Gemma4UnifiedForCausalLM`, and the text of `Gemma4UnifiedForConditionalGeneration`."""

    model_type = "gemma4_unified_text"


def _input_size(config: Any) -> int:
    return getattr(config, "hidden_size_per_layer_input", 0) or 0


class LayerInputs(nn.Module):
    """Embeddings of tokens for each layer, half from their ids and half from their first hidden states."""

    def __init__(self, shape: Gemma4Shape, context: BuildContext) -> None:
        super().__init__()
        size = shape.num_layers * shape.input_size
        self.shape, self.scale = shape, rounded(shape.input_size**0.5, context)
        self.embedding = VocabParallelEmbedding(shape.input_vocab_size, size, context)
        self.projection = ReplicatedLinear(shape.hidden_size, size, context)
        self.norm = RMSNorm(shape.input_size, shape.norm_eps, context)

    def forward(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """token_ids [tokens], x [tokens, hidden] -> [layers, tokens, input_size]."""
        by_layer = (len(x), self.shape.num_layers, self.shape.input_size)
        own = self.embedding(token_ids).mul_(self.scale).view(by_layer)
        projected = self.norm(self.projection(x).mul_(self.shape.hidden_size**-0.5).view(by_layer))
        return ((projected + own) * 2**-0.5).transpose(0, 1)

    def weights(self) -> Iterator[WeightRule]:
        yield WeightRule("model.embed_tokens_per_layer.weight", self.embedding.weight)
        yield WeightRule("model.per_layer_model_projection.weight", self.projection.weight)
        yield WeightRule("model.per_layer_projection_norm.weight", self.norm.weight)


class Gemma4Block(Block):
    """A layer that also adds its embeddings of the tokens, and then scales the residual stream."""

    def __init__(self, index: int, decoder: Gemma4Shape, context: BuildContext) -> None:
        super().__init__(index, decoder, context)
        self.activation = ACTIVATIONS[decoder.activation]
        self.scalar = whole((1,), context, scale=True)
        self.has_inputs = decoder.input_size > 0
        if self.has_inputs:
            self.gate = ReplicatedLinear(decoder.hidden_size, decoder.input_size, context)
            self.projection = ReplicatedLinear(decoder.input_size, decoder.hidden_size, context)
            self.projection_norm = decoder.norm(context)

    def add_to(
        self,
        residual: Residual,
        rotations: Sequence[Rotation],
        wanted: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        """`inputs` [tokens, input_size]: those of this layer."""
        super().add_to(residual, rotations, wanted)
        if inputs is not None:
            own = inputs if wanted is None else inputs.index_select(0, wanted)
            gated = self.activation(self.gate(residual.summed())) * own
            residual.add_parts(self.projection_norm(self.projection(gated))[None])
        residual.summed().mul_(self.scalar)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from super().weights(prefix)
        yield WeightRule(f"{prefix}layer_scalar", self.scalar)
        if self.has_inputs:
            yield WeightRule(f"{prefix}per_layer_input_gate.weight", self.gate.weight)
            yield WeightRule(f"{prefix}per_layer_projection.weight", self.projection.weight)
            yield WeightRule(
                f"{prefix}post_per_layer_input_norm.weight", self.projection_norm.weight
            )


class Gemma4Decoder(Decoder):
    shape: Gemma4Shape
    blocks: Sequence[Gemma4Block]  # type: ignore[assignment]

    def __init__(self, shape: Gemma4Shape, context: BuildContext) -> None:
        super().__init__(shape, context)
        self.inputs = LayerInputs(shape, context) if shape.input_size else None

    def block(self, index: int, context: BuildContext) -> Block:
        return Gemma4Block(index, self.shape, context)

    def adders(
        self, token_ids: torch.Tensor, x: torch.Tensor
    ) -> Sequence[Callable[[Residual, Sequence[Rotation], torch.Tensor | None], None]]:
        if self.inputs is None:
            return super().adders(token_ids, x)
        return [
            partial(block.add_to, inputs=own)
            for block, own in zip(self.blocks, self.inputs(token_ids, x), strict=True)
        ]

    def rules(self) -> Iterator[WeightRule]:
        yield from super().rules()
        if self.inputs is not None:
            yield from self.inputs.weights()
