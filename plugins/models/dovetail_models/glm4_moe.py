"""GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates a part of each head, and the routing
of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block, FeedForward
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.rotary import Rope, rope_from_config
from dovetail_models.arch import (
    DecoderArch,
    after_the_last,
    experts_reasons,
    head_size,
    partial_rope_reasons,
)
from dovetail_models.grouped import group_reasons, grouped_feed_forward, sigmoid_grouping


class Glm4Moe(DecoderArch):
    """Serves `Glm4MoeForCausalLM`."""

    model_type = "glm4_moe"
    handled = frozenset(
        {
            *(
                "attention_bias",
                "use_qk_norm",
                "first_k_dense_replace",
                "n_routed_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
            ),
            *(
                "n_shared_experts",
                "n_group",
                "topk_group",
                "norm_topk_prob",
                "routed_scaling_factor",
            ),
            *(
                "num_mtp_layers",
                "num_nextn_predict_layers",
                "output_router_logits",
            ),  # for multi-token prediction and training
        }
    )

    def rope_reasons(self, config: Any) -> list[str]:
        return partial_rope_reasons(config, config.rope_parameters or {})

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if self._sparse(config):
            reasons += experts_reasons(config, "n_routed_experts") or group_reasons(config, 2)
        return reasons

    def _sparse(self, config: Any) -> frozenset[int]:
        return frozenset(range(config.first_k_dense_replace or 0, config.num_hidden_layers))

    def rope(self, config: Any, index: int) -> Rope:
        return rope_from_config(config.rope_parameters, head_size(config), partial=True)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Attention]:
        return self._block(config, spec, context, sparse=spec.index in self._sparse(config))

    def mtp_block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Attention]:
        """Return the layer that predicts further tokens."""
        return self._block(config, spec, context, sparse=bool(self._sparse(config)))

    def _block(
        self, config: Any, spec: LayerSpec, context: BuildContext, *, sparse: bool
    ) -> Block[Attention]:
        hidden = config.hidden_size
        feed_forward: FeedForward
        if sparse:
            feed_forward = self.experts(config, context)
        else:
            feed_forward = GatedFeedForward(hidden, config.intermediate_size, context)
        return Block(
            self.norm(config, context),
            Attention(
                hidden,
                spec,
                context,
                bias=config.attention_bias,
                qk_norm_eps=config.rms_norm_eps if config.use_qk_norm else None,
            ),
            self.norm(config, context),
            feed_forward,
        )

    def experts(self, config: Any, context: BuildContext) -> FeedForward:
        hidden = config.hidden_size
        shared_inner = config.moe_intermediate_size * (config.n_shared_experts or 0)
        return grouped_feed_forward(
            config,
            sigmoid_grouping(config),
            context,
            normalize=bool(config.norm_topk_prob),
            shared=GatedFeedForward(hidden, shared_inner, context) if shared_inner else None,
        )

    def skipped(self, config: Any) -> list[str]:
        return after_the_last(config, "num_nextn_predict_layers")
