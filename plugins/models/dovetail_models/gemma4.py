"""The text models of Gemma 4: heads by kind of layer, later layers that share K and V of earlier
ones, embeddings for each layer; dense, or with experts beside each feed-forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelInputs, WeightRule
from dovetail.nn.activation import ACTIVATIONS
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import AddTo, Decoder
from dovetail.nn.embedding import VocabParallelEmbedding
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.linear import ReplicatedLinear
from dovetail.nn.moe import Experts, Router, Stacked, choose
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parameter import weight_rules, whole
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rope, Rotation, rope_from_config
from dovetail_models.arch import experts_reasons, head_size, layer_type_reasons, rounded
from dovetail_models.gemma import GemmaArch, GemmaBlock, feed_forward, ropes_reasons_against

_BY_LAYER = {"head_dim", "num_key_value_heads"}  # what a config may hold for single layers


class LayerInputs(nn.Module):
    """Embeddings of tokens for each layer, half from their ids and half from their first hidden
    states. Placeholders of images count as padding."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__()
        own = _input_size(config)
        self.padding_id = config.pad_token_id or 0
        hidden = config.hidden_size
        size = config.num_hidden_layers * own
        self.shape = (config.num_hidden_layers, own)
        self.scale = rounded(own**0.5, context)
        self.projection_scale = hidden**-0.5
        self.embedding = VocabParallelEmbedding(config.vocab_size_per_layer_input, size, context)
        self.projection = ReplicatedLinear(hidden, size, context)
        self.norm = RMSNorm(own, config.rms_norm_eps, context)

    def forward(self, inputs: ModelInputs, x: torch.Tensor) -> torch.Tensor:
        """The step's inputs, x [tokens, hidden] -> [layers, tokens, input_size]."""
        by_layer = (len(x), *self.shape)
        token_ids = inputs.token_ids
        if inputs.is_row is not None:
            token_ids = token_ids.masked_fill(inputs.is_row, self.padding_id)
        own = self.embedding(token_ids).mul_(self.scale).view(by_layer)
        projected = self.projection(x).mul_(self.projection_scale).view(by_layer)
        return ((self.norm(projected) + own) * 2**-0.5).transpose(0, 1)

    def weights(self) -> Iterator[WeightRule]:
        yield from weight_rules(
            "model.",
            {
                "embed_tokens_per_layer": self.embedding,
                "per_layer_model_projection": self.projection,
                "per_layer_projection_norm": self.norm,
            },
        )


class Gemma4Attention(Attention):
    """Attention that norms the heads of V, too, without a weight. `v_is_k`: V is made of K's
    projection, before K's norm and rotation."""

    def __init__(
        self, config: Any, spec: LayerSpec, context: BuildContext, *, v_is_k: bool
    ) -> None:
        bias = config.attention_bias
        eps = config.rms_norm_eps
        super().__init__(
            config.hidden_size, spec, context, bias=bias, output_bias=bias, qk_norm_eps=eps
        )
        self.eps = eps
        self.v_is_k = v_is_k

    def store(
        self, x: torch.Tensor | Residual, norm: Norm | None, rotation: Rotation
    ) -> torch.Tensor:
        spec = self.attn.spec
        qkv = self.qkv_proj(x, norm)
        qkv = qkv.view(len(qkv), -1, spec.head_size)
        if spec.shares is None:
            v = qkv[:, -spec.kv_heads :]
            v.copy_(F.rms_norm(v, v.shape[-1:], None, self.eps))
        return rope_and_store_kv(qkv, self.qk_norm, rotation, self.attn)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        for rule in super().weights(prefix):
            source = rule.source.replace("v_proj", "k_proj") if self.v_is_k else rule.source
            yield replace(rule, source=source)
        if self.attn.spec.shares is not None:  # some checkpoints have these, unused
            for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
                yield WeightRule(f"{prefix}{name}.*", None, optional=True)


class InputGate(nn.Module):
    """Adds a layer's embeddings of the tokens to the stream, gated by it."""

    def __init__(self, config: Any, norm: Norm, context: BuildContext) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_activation]
        self.gate = ReplicatedLinear(config.hidden_size, _input_size(config), context)
        self.projection = ReplicatedLinear(_input_size(config), config.hidden_size, context)
        self.norm = norm

    def add_to(self, residual: Residual, inputs: torch.Tensor) -> None:
        """inputs [tokens, input_size]."""
        gated = self.activation(self.gate(residual.summed())) * inputs
        residual.add_parts(self.norm(self.projection(gated))[None])

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix,
            {
                "per_layer_input_gate": self.gate,
                "per_layer_projection": self.projection,
                "post_per_layer_input_norm": self.norm,
            },
        )


class Mixture(nn.Module):
    """Experts that read the stream through norms of their own, whose sum is normed, too."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__()
        hidden = config.hidden_size
        count = config.num_experts
        eps = config.rms_norm_eps
        self.router_norm = RMSNorm(hidden, eps, context)
        self.router = Router(hidden, count, context)
        self.logit_scale = hidden**-0.5
        self.expert_scales = whole((count,), context, scale=True)
        self.experts = Experts(
            hidden,
            config.moe_intermediate_size,
            count,
            context,
            config.hidden_activation,
            stacked=Stacked(optional=True),
            per_token=config.top_k_experts,
        )
        self.norm = RMSNorm(hidden, eps, context)
        self.output_norm = RMSNorm(hidden, eps, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream x [tokens, hidden] -> what is to be added to the feed-forward's output."""
        logits = self.router(self.router_norm(x)) * self.logit_scale
        ids, weights = choose(logits, self.experts.per_token, normalize=True)
        weights = weights * self.expert_scales[ids.long()].float()
        total = Residual(torch.zeros_like(x))
        self.experts.add_to(total, self.norm(x), ids, weights)
        return self.output_norm(total.summed())

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix,
            {
                "router.proj": self.router,
                "pre_feedforward_layernorm_2": self.norm,
                "post_feedforward_layernorm_2": self.output_norm,
            },
        )
        yield WeightRule(f"{prefix}router.scale", self.router_norm.weight)
        yield WeightRule(f"{prefix}router.per_expert_scale", self.expert_scales)
        yield from self.experts.weights(f"{prefix}experts.")


class SparseFeedForward(nn.Module):
    """A feed-forward whose output is normed, and a mixture beside it."""

    def __init__(self, mlp: GatedFeedForward, output_norm: Norm, mixture: Mixture) -> None:
        super().__init__()
        self.mlp = mlp
        self.output_norm = output_norm
        self.mixture = mixture

    def add_to(self, residual: Residual, norm: Norm, output_norm: Norm) -> None:
        """See `GatedFeedForward.add_to`."""
        chosen = self.mixture(residual.summed())
        dense = self.output_norm(self.mlp.down_proj(self.mlp.inner(residual, norm)))
        residual.add_parts(output_norm(dense + chosen)[None])

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for a layer's tensors, whose names begin with `prefix` without `mlp.`."""
        yield from self.mlp.weights(prefix)
        layer = prefix.removesuffix("mlp.")
        yield from weight_rules(layer, {"post_feedforward_layernorm_1": self.output_norm})
        yield from self.mixture.weights(layer)


class Gemma4Block(GemmaBlock):
    """Block that also adds its embeddings of the tokens, and then scales the residual stream."""

    def __init__(self, *parts: Any) -> None:
        """`parts`: those of `GemmaBlock`, the scale [1], and the `InputGate` or None."""
        *of_block, scalar, input_gate = parts
        super().__init__(*of_block)
        self.scalar = scalar
        self.input_gate = input_gate

    def add_to(
        self,
        residual: Residual,
        rotation: Rotation,
        wanted: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        """`inputs` [tokens, input_size]: those of this layer."""
        super().add_to(residual, rotation, wanted)
        if inputs is not None:
            own = inputs if wanted is None else inputs.index_select(0, wanted)
            self.input_gate.add_to(residual, own)
        residual.summed().mul_(self.scalar)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from super().weights(prefix)
        yield WeightRule(f"{prefix}layer_scalar", self.scalar)
        if self.input_gate is not None:
            yield from self.input_gate.weights(prefix)


class Gemma4Decoder(Decoder):
    blocks: Sequence[Gemma4Block]
    inputs: LayerInputs | None

    def added(self, inputs: ModelInputs, x: torch.Tensor) -> Sequence[AddTo]:
        if self.inputs is None:
            return super().added(inputs, x)
        by_layer = self.inputs(inputs, x)
        return [
            partial(block.add_to, inputs=own)
            for block, own in zip(self.blocks, by_layer, strict=True)
        ]

    def weights(self) -> Iterator[WeightRule]:
        yield from super().weights()
        if self.inputs is not None:
            yield from self.inputs.weights()


class Gemma4(GemmaArch):
    """Serves `Gemma4ForCausalLM`, and the text of `Gemma4ForConditionalGeneration`."""

    model_type = "gemma4_text"
    handled = GemmaArch.handled | {
        *("vocab_size_per_layer_input", "hidden_size_per_layer_input", "attention_k_eq_v"),
        *("num_kv_shared_layers", "use_double_wide_mlp"),
        "enable_moe_block",  # without it the next three aren't read
        *("num_experts", "top_k_experts", "moe_intermediate_size"),
        *("per_layer_config", "_heterogeneity_spec"),  # made of global_head_dim; checked below
    }
    decoder = Gemma4Decoder
    causal = (None, "vision")  # text is causal with the latter, too

    def layer_configs(self, config: Any) -> list[Any]:
        return list(config.per_layer_config)

    def rope_reasons(self, config: Any) -> list[str]:
        return ropes_reasons_against(config.rope_parameters)

    def reasons_against_fields(self, config: Any) -> list[str]:
        if reasons := layer_type_reasons(config):
            return reasons
        reasons = super().reasons_against_fields(config)
        if _has_experts(config):
            wrong = experts_reasons(config, "num_experts", per_token_name="top_k_experts")
            reasons += [f"enable_moe_block: {reason}" for reason in wrong]
        for index, layer in enumerate(config.per_layer_config):
            own = {
                key
                for key, value in vars(layer).items()
                if key != "skip" and value != vars(config).get(key)
            } - _BY_LAYER
            if own or getattr(layer, "skip", None):
                reasons.append(
                    f"per_layer_config: {', '.join(sorted(own)) or 'skip'} of layer {index} is not "
                    f"implemented"
                )
        if _input_size(config) and config.vocab_size_per_layer_input < config.vocab_size:
            reasons.append(
                f"vocab_size_per_layer_input = {config.vocab_size_per_layer_input} is less than "
                f"vocab_size ({config.vocab_size})"
            )
        shared = config.num_kv_shared_layers
        kinds = config.layer_types
        if not 0 <= shared < len(kinds) or set(kinds[len(kinds) - shared :]) - set(
            kinds[: len(kinds) - shared]
        ):
            reasons.append(
                f"num_kv_shared_layers = {shared}: no earlier layer of the same kind has K and V "
                f"for each of these"
            )
        return reasons

    def spec(self, config: Any, index: int) -> LayerSpec:
        kinds = config.layer_types
        layer = config.per_layer_config[index]
        first_sharing = len(kinds) - config.num_kv_shared_layers
        shares = None
        if index >= first_sharing:
            alike = (other for other in range(first_sharing) if kinds[other] == kinds[index])
            shares = max(alike)
        window = self.window(config, index)
        of_images = config.use_bidirectional_attention == "vision"
        return LayerSpec(
            index,
            config.num_attention_heads,
            layer.num_key_value_heads,
            layer.head_dim,
            scale=1.0,
            window=window,
            shares=shares,
            both_ways=of_images and window is not None,
        )

    def rope(self, config: Any, index: int) -> Rope:
        parameters = config.rope_parameters[config.layer_types[index]]
        return rope_from_config(parameters, head_size(config.per_layer_config[index]))

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> GemmaBlock:
        is_wide = config.use_double_wide_mlp and spec.shares is not None
        is_full = config.layer_types[spec.index] == "full_attention"
        return Gemma4Block(
            self.norm(config, context),
            Gemma4Attention(config, spec, context, v_is_k=config.attention_k_eq_v and is_full),
            self.norm(config, context),
            self.norm(config, context),
            self.feed_forward(config, config.intermediate_size * (2 if is_wide else 1), context),
            self.norm(config, context),
            whole((1,), context, scale=True),
            self.input_gate(config, context),
        )

    def feed_forward(
        self, config: Any, inner: int, context: BuildContext
    ) -> GatedFeedForward | SparseFeedForward:
        mlp = feed_forward(config, inner, context)
        if not _has_experts(config):
            return mlp
        return SparseFeedForward(mlp, self.norm(config, context), Mixture(config, context))

    def input_gate(self, config: Any, context: BuildContext) -> InputGate | None:
        if not _input_size(config):
            return None
        return InputGate(config, self.norm(config, context), context)

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        model: Any = super().build(config, context)
        model.inputs = LayerInputs(config, context) if _input_size(config) else None
        return model  # type: ignore[no-any-return]


class Gemma4Unified(Gemma4):
    """Serves `Gemma4UnifiedForCausalLM`, and the text of
    `Gemma4UnifiedForConditionalGeneration`."""

    model_type = "gemma4_unified_text"


def _input_size(config: Any) -> int:
    return getattr(config, "hidden_size_per_layer_input", 0) or 0


def _has_experts(config: Any) -> bool:
    return bool(getattr(config, "enable_moe_block", False))
