"""gpt-oss: all feed-forwards are mixtures of experts, with biases; heads have sinks; every second layer has a window."""

from __future__ import annotations

from typing import Any

from dovetail.nn.activation import ClampedSwiGLU
from dovetail.nn.moe import Stacked
from dovetail_models.arch import (
    ShapedArch,
    base_shape,
    experts_reasons,
    layer_type_reasons,
    windows_by_layer_type,
)
from dovetail_models.decoder import DecoderShape, ExpertsShape


class GptOss(ShapedArch):
    """Serves `GptOssForCausalLM`."""

    model_type = "gpt_oss"
    handled = frozenset(
        {
            *("attention_bias", "sliding_window", "layer_types", "swiglu_alpha", "swiglu_limit"),
            *("num_local_experts", "num_experts_per_tok", "experts_per_token"),
            *(
                "router_aux_loss_coef",
                "output_router_logits",
                "initial_context_length",
            ),  # only for training; also in `rope_parameters`
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = [
            *super().reasons_against_fields(config),
            *layer_type_reasons(config),
            *experts_reasons(config, "num_local_experts", "intermediate_size"),
        ]
        if (other := getattr(config, "experts_per_token", None)) not in (
            None,
            config.num_experts_per_tok,
        ):
            reasons.append(
                f"experts_per_token = {other}, and num_experts_per_tok = {config.num_experts_per_tok}"
            )
        return reasons

    def shape(self, config: Any) -> DecoderShape:
        bias, count = config.attention_bias, config.num_local_experts
        experts = ExpertsShape(
            frozenset(range(config.num_hidden_layers)),
            count,
            config.num_experts_per_tok,
            config.intermediate_size,
            normalize=True,
            bias=True,
            activation=_activation(config),
            stacked=Stacked(interleaved=True, transposed=True),
            router="router",
        )
        windows = windows_by_layer_type(config)
        return base_shape(
            config, windows=windows, qkv_bias=bias, output_bias=bias, sinks=True, experts=experts
        )


def _activation(config: Any) -> ClampedSwiGLU:
    """Return the activation; transformers before 5.23 has these two numbers in its code instead of its config."""
    return ClampedSwiGLU(
        getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    )
