"""DeepSeek-V2, V3 and V3.2, and models of the same architectures (GLM-4.7-Flash, GLM-5): latent
attention, in V3.2 and GLM-5 to selected tokens, and grouped routed experts plus shared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dovetail.api.attention import Indexer, LayerSpec
from dovetail.api.model import BuildContext
from dovetail.nn.decoder import Block, FeedForward
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.rotary import Rope, rope_from_config
from dovetail_models.arch import DecoderArch, after_the_last, experts_reasons
from dovetail_models.grouped import (
    Grouping,
    group_reasons,
    grouped_feed_forward,
    sigmoid_grouping,
)
from dovetail_models.indexer import IndexedLatentAttention
from dovetail_models.latent import LatentAttention, LatentShape

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class DeepseekV3(DecoderArch):
    """Serves `DeepseekV3ForCausalLM`."""

    model_type = "deepseek_v3"
    handled = frozenset(
        {
            *(*_SIZES, "q_lora_rank", "qk_head_dim", "attention_bias", "rope_interleave"),
            *(
                "n_routed_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "n_shared_experts",
                "first_k_dense_replace",
            ),
            *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
            *(
                "num_mtp_layers",
                "num_nextn_predict_layers",
                "output_router_logits",
            ),  # for multi-token prediction and training
            *(
                "scoring_func",
                "topk_method",
                "aux_loss_alpha",
                "seq_aux",
                "moe_layer_freq",
                "ep_size",
            ),  # checked below, or only for training
        }
    )
    sizes: tuple[str, ...] = _SIZES  # fields that must be at least 1
    scoring = "sigmoid"
    method = "noaux_tc"
    pair = 2

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = [*super().reasons_against_fields(config)]
        reasons += [
            f"{name} = {getattr(config, name)} must be at least 1"
            for name in self.sizes
            if (getattr(config, name) or 0) < 1
        ]
        if config.qk_rope_head_dim % 2:
            reasons.append(
                f"qk_rope_head_dim = {config.qk_rope_head_dim} must be even, for rotary positions"
            )
        if config.head_dim != config.qk_rope_head_dim:
            reasons.append(
                f"head_dim = {config.head_dim} must be qk_rope_head_dim ({config.qk_rope_head_dim})"
            )
        if config.attention_bias and config.q_lora_rank is None:
            reasons.append("attention_bias without q_lora_rank is not implemented")
        if config.num_key_value_heads != config.num_attention_heads:
            reasons.append(
                f"num_key_value_heads = {config.num_key_value_heads} must be num_attention_heads "
                f"({config.num_attention_heads})"
            )
        if getattr(config, "moe_layer_freq", 1) != 1:
            reasons.append(f"moe_layer_freq = {config.moe_layer_freq} is not implemented (only 1)")
        if self._sparse(config):
            reasons += self._routing_reasons(config)
        return reasons

    def _routing_reasons(self, config: Any) -> list[str]:
        if reasons := experts_reasons(config, "n_routed_experts"):
            return reasons
        scoring = getattr(config, "scoring_func", self.scoring)
        method = getattr(config, "topk_method", self.method)
        if scoring != self.scoring:
            reasons.append(f"scoring_func = {scoring!r} is not implemented (only {self.scoring!r})")
        if method not in (self.method, None):
            reasons.append(f"topk_method = {method!r} is not implemented (only {self.method!r})")
        return reasons + group_reasons(config, self.pair)

    def _sparse(self, config: Any) -> frozenset[int]:
        return frozenset(range(config.first_k_dense_replace or 0, config.num_hidden_layers))

    def _grouping(self, config: Any) -> Grouping:
        return sigmoid_grouping(config)

    def _normalizes(self, config: Any) -> bool:
        return bool(config.norm_topk_prob)

    def _interleaves(self, config: Any) -> bool:
        return bool(config.rope_interleave)

    def rope(self, config: Any, index: int) -> Rope:
        return rope_from_config(config.rope_parameters, config.qk_rope_head_dim)

    def latent(self, config: Any) -> LatentShape:
        return LatentShape(
            q_rank=config.q_lora_rank,
            kv_rank=config.kv_lora_rank,
            plain=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            value=config.v_head_dim,
            scale=_scale(config),
            interleaved=self._interleaves(config),
        )

    def spec(self, config: Any, index: int) -> LayerSpec:
        return self.latent(config).layer_spec(index, config.num_attention_heads)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[LatentAttention]:
        return self._block(config, spec, context, sparse=spec.index in self._sparse(config))

    def mtp_block(
        self, config: Any, spec: LayerSpec, context: BuildContext
    ) -> Block[LatentAttention]:
        """Return the layer that predicts further tokens."""
        return self._block(config, spec, context, sparse=bool(self._sparse(config)))

    def _block(
        self, config: Any, spec: LayerSpec, context: BuildContext, *, sparse: bool
    ) -> Block[LatentAttention]:
        return Block(
            self.norm(config, context),
            self.attention(config, spec, context),
            self.norm(config, context),
            self.experts(config, context) if sparse else self.dense(config, None, context),
        )

    def attention(self, config: Any, spec: LayerSpec, context: BuildContext) -> LatentAttention:
        bias = config.attention_bias
        return LatentAttention(config.hidden_size, spec, self.latent(config), context, bias=bias)

    def dense(self, config: Any, inner: int | None, context: BuildContext) -> GatedFeedForward:
        """Return a feed-forward with the inner size `inner`; None: that of dense layers."""
        bias = bool(getattr(config, "mlp_bias", False))
        inner = inner or config.intermediate_size
        return GatedFeedForward(config.hidden_size, inner, context, bias=bias)

    def experts(self, config: Any, context: BuildContext) -> FeedForward:
        shared_inner = config.moe_intermediate_size * (config.n_shared_experts or 0)
        return grouped_feed_forward(
            config,
            self._grouping(config),
            context,
            normalize=self._normalizes(config),
            shared=self.dense(config, shared_inner, context) if shared_inner else None,
        )

    def skipped(self, config: Any) -> list[str]:
        return after_the_last(config, "num_nextn_predict_layers", "num_mtp_layers")


class DeepseekV2(DeepseekV3):
    """Serves `DeepseekV2ForCausalLM`."""

    model_type = "deepseek_v2"
    handled = DeepseekV3.handled - {"rope_interleave"} | {"mlp_bias"}
    scoring = "softmax"
    pair = 1

    def _routing_reasons(self, config: Any) -> list[str]:
        if reasons := experts_reasons(config, "n_routed_experts"):
            return reasons
        if (scoring := getattr(config, "scoring_func", "softmax")) != "softmax":
            reasons.append(f"scoring_func = {scoring!r} is not implemented (only 'softmax')")
        if config.norm_topk_prob:
            reasons.append(
                "norm_topk_prob = True is not implemented: transformers, the reference, doesn't "
                "normalize the weights of this model"
            )
        if config.topk_method not in ("greedy", "group_limited_greedy"):
            reasons.append(
                f"topk_method = {config.topk_method!r} is not implemented (only 'greedy' and "
                f"'group_limited_greedy')"
            )
        elif config.topk_method == "group_limited_greedy":
            reasons += group_reasons(config, self.pair)
        return reasons

    def _grouping(self, config: Any) -> Grouping:
        groups, kept = (
            (1, 1)
            if config.topk_method == "greedy"
            else (config.n_group or 1, config.topk_group or 1)
        )
        return Grouping(
            "softmax", groups, kept, self.pair, config.routed_scaling_factor, corrected=False
        )

    def _normalizes(self, config: Any) -> bool:
        return False

    def _interleaves(self, config: Any) -> bool:
        return True


class Glm4MoeLite(DeepseekV3):
    """Serves `Glm4MoeLiteForCausalLM`, GLM-4.7-Flash."""

    model_type = "glm4_moe_lite"
    handled = DeepseekV3.handled | {"mlp_layer_types"}

    def reasons_against_fields(self, config: Any) -> list[str]:
        kinds = set(config.mlp_layer_types) - {"dense", "sparse"}
        if kinds or len(config.mlp_layer_types) != config.num_hidden_layers:
            return [
                f"mlp_layer_types must have one of 'dense' and 'sparse' for each of "
                f"{config.num_hidden_layers} layers"
            ]
        # transformers, the reference, doesn't read it
        dense = getattr(config, "first_k_dense_replace", None)
        if dense is not None and self._sparse(config) != super()._sparse(config):
            return [
                f"first_k_dense_replace = {dense} disagrees with mlp_layer_types, which says which "
                f"layers have experts"
            ]
        return super().reasons_against_fields(config)

    def _sparse(self, config: Any) -> frozenset[int]:
        return frozenset(
            index for index, kind in enumerate(config.mlp_layer_types) if kind == "sparse"
        )


class DeepseekV32(Glm4MoeLite):
    """Serves `DeepseekV32ForCausalLM`."""

    model_type = "deepseek_v32"
    sizes = (*_SIZES, "q_lora_rank", "index_topk", "index_n_heads", "index_head_dim")
    handled = Glm4MoeLite.handled | {*sizes, "layer_types", "indexer_rope_interleave"}
    index_interleaves = False

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = []
        if config.index_head_dim < config.qk_rope_head_dim:
            reasons.append(
                f"index_head_dim = {config.index_head_dim} is less than qk_rope_head_dim "
                f"({config.qk_rope_head_dim}), the numbers of it that rotate"
            )
        for name, only in (
            ("rope_interleave", True),
            ("indexer_rope_interleave", self.index_interleaves),
        ):
            if getattr(config, name, only) != only:  # transformers reads neither
                reasons.append(f"{name} = {not only} is not implemented (only {only})")
        if set(config.layer_types) != {"indexed_attention"}:
            reasons.append("layer_types: only indexed_attention is implemented")
        return [*reasons, *super().reasons_against_fields(config)]

    def _interleaves(self, config: Any) -> bool:
        return True

    def _selects(self, config: Any, index: int) -> bool:
        return True

    def spec(self, config: Any, index: int) -> LayerSpec:
        selects = self._selects(config, index)
        sizes = config.index_topk, config.index_n_heads, config.index_head_dim
        return replace(super().spec(config, index), indexer=Indexer(*sizes, selects))

    def attention(self, config: Any, spec: LayerSpec, context: BuildContext) -> LatentAttention:
        return IndexedLatentAttention(
            config.hidden_size,
            spec,
            self.latent(config),
            context,
            bias=config.attention_bias,
            interleaved=self.index_interleaves,
        )


class GlmMoeDsa(DeepseekV32):
    """Serves `GlmMoeDsaForCausalLM`, GLM-5."""

    model_type = "glm_moe_dsa"
    handled = DeepseekV32.handled | {
        "indexer_types",
        *("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),  # it is made of them
    }
    index_interleaves = True

    def reasons_against_fields(self, config: Any) -> list[str]:
        kinds = config.indexer_types
        if set(kinds) - {"full", "shared"} or len(kinds) != config.num_hidden_layers:
            return [
                f"indexer_types must have one of 'full' and 'shared' for each of "
                f"{config.num_hidden_layers} layers"
            ]
        if kinds[0] != "full":
            return ["indexer_types: the first layer is 'shared', with no layer before it"]
        return super().reasons_against_fields(config)

    def _selects(self, config: Any, index: int) -> bool:
        return bool(config.indexer_types[index] == "full")


def _scale(config: Any) -> float:
    """Return the multiplier of scores, including that of a scaled rotary embedding."""
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" and (all_dim := rope.get("mscale_all_dim")):
        factor = rope["factor"]
        scale *= (1.0 if factor <= 1 else 0.1 * all_dim * math.log(factor) + 1.0) ** 2
    return scale
