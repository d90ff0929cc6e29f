"""Qwen3 mixture of experts: attention like dense Qwen3; all or every n-th feed-forward is a
mixture."""

from __future__ import annotations

from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block, FeedForward
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.moe import Experts, Router, SparseFeedForward, Stacked
from dovetail_models.arch import DecoderArch, experts_reasons, window_reasons


class Qwen3Moe(DecoderArch):
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

    def window(self, config: Any, index: int) -> int | None:
        return config.sliding_window  # type: ignore[no-any-return]

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Attention]:
        bias = config.attention_bias
        return Block(
            self.norm(config, context),
            Attention(
                config.hidden_size,
                spec,
                context,
                bias=bias,
                output_bias=bias,
                qk_norm_eps=config.rms_norm_eps,
            ),
            self.norm(config, context),
            self.feed_forward(config, spec.index, context),
        )

    def feed_forward(self, config: Any, index: int, context: BuildContext) -> FeedForward:
        hidden = config.hidden_size
        count = config.num_experts
        is_sparse = count and (index + 1) % config.decoder_sparse_step == 0
        if not is_sparse or index in config.mlp_only_layers:
            return GatedFeedForward(hidden, config.intermediate_size, context)
        experts = Experts(
            hidden,
            config.moe_intermediate_size,
            count,
            context,
            stacked=Stacked(transposed=True, optional=True),  # as Qwen3-VL's are
            per_token=config.num_experts_per_tok,
        )
        router = Router(hidden, count, context)
        return SparseFeedForward(router, experts, normalize=config.norm_topk_prob)
