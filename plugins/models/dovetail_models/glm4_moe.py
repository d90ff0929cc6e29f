"""GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates a part of each head, and the routing of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from dovetail.nn.rotary import rope_from_config, rope_reasons_against
from dovetail_models.arch import ShapedArch, base_shape, experts_reasons, head_size
from dovetail_models.decoder import DecoderShape, ExpertsShape
from dovetail_models.grouped import Grouping, group_reasons


class Glm4Moe(ShapedArch):
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
        parameters, size = config.rope_parameters or {}, head_size(config)
        if reasons := rope_reasons_against(parameters, partial=True):
            return reasons
        rotated = rope_from_config(parameters, size, partial=True).head_size
        return (
            [
                f"partial_rotary_factor rotates {rotated} of {size} numbers of a head, which must be even"
            ]
            if rotated % 2
            else []
        )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if self._sparse(config):
            reasons += experts_reasons(config, "n_routed_experts") or group_reasons(config, 2)
        return reasons

    def _sparse(self, config: Any) -> frozenset[int]:
        return frozenset(range(config.first_k_dense_replace or 0, config.num_hidden_layers))

    def shape(self, config: Any) -> DecoderShape:
        inner, sparse, experts = config.moe_intermediate_size, self._sparse(config), None
        if sparse:
            experts = ExpertsShape(
                sparse,
                config.n_routed_experts,
                config.num_experts_per_tok,
                inner,
                bool(config.norm_topk_prob),
                shared_inner=inner * (config.n_shared_experts or 0),
                grouping=Grouping(
                    "sigmoid",
                    config.n_group or 1,
                    config.topk_group or 1,
                    2,
                    config.routed_scaling_factor,
                    corrected=True,
                ),
            )
        return base_shape(
            config,
            rope=rope_from_config(config.rope_parameters, head_size(config), partial=True),
            qk_norm=bool(config.use_qk_norm),
            qkv_bias=config.attention_bias,
            experts=experts,
            unused_layers=config.num_nextn_predict_layers or 0,
        )
