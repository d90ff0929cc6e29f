"""Qwen3 mixture of experts: attention like dense Qwen3; all or every n-th feed-forward is a mixture."""

from __future__ import annotations

from typing import Any

from dovetail.nn.moe import Stacked
from dovetail_models.arch import ShapedArch, base_shape, experts_reasons, window_reasons
from dovetail_models.decoder import DecoderShape, ExpertsShape


class Qwen3Moe(ShapedArch):
    """Serves `Qwen3MoeForCausalLM`."""

    model_type = "qwen3_moe"
    handled = frozenset(
        {
            *("attention_bias", "sliding_window", "use_sliding_window", "max_window_layers"),
            *(
                "num_experts",
                "num_local_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "norm_topk_prob",
            ),
            *(
                "decoder_sparse_step",
                "mlp_only_layers",
                "router_aux_loss_coef",
                "output_router_logits",
            ),  # the last two are only for training
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = [*super().reasons_against_fields(config), *window_reasons(config)]
        if (step := config.decoder_sparse_step) < 1:
            reasons.append(f"decoder_sparse_step = {step} must be at least 1")
        return reasons + (experts_reasons(config, "num_experts") if config.num_experts else [])

    def shape(self, config: Any) -> DecoderShape:
        bias, count = config.attention_bias, config.num_experts
        windows = (config.sliding_window,) * config.num_hidden_layers
        sparse = (
            index
            for index in range(config.num_hidden_layers)
            if (index + 1) % config.decoder_sparse_step == 0
        )
        layers = frozenset(sparse) - set(config.mlp_only_layers) if count else frozenset()
        experts = ExpertsShape(
            layers,
            count,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            config.norm_topk_prob,
            stacked=Stacked(transposed=True, optional=True),  # as Qwen3-VL's are
        )
        return base_shape(
            config, windows=windows, qk_norm=True, qkv_bias=bias, output_bias=bias, experts=experts
        )
