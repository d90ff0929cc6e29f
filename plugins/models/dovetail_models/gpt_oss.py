"""gpt-oss: all feed-forwards are mixtures of experts, with biases; heads have sinks; every second
layer has a window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.activation import ClampedSwiGLU
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block
from dovetail.nn.moe import Experts, Router, SparseFeedForward, Stacked
from dovetail.nn.parameter import Part, Weight
from dovetail_models.arch import (
    DecoderArch,
    experts_reasons,
    layer_type_reasons,
    window_of_layer_type,
)


class GptOss(DecoderArch):
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
                f"experts_per_token = {other}, and num_experts_per_tok = "
                f"{config.num_experts_per_tok}"
            )
        return reasons

    def window(self, config: Any, index: int) -> int | None:
        return window_of_layer_type(config, index)

    def spec(self, config: Any, index: int) -> LayerSpec:
        return replace(super().spec(config, index), sinks=True)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Attention]:
        return Block(
            self.norm(config, context),
            GptOssAttention(config, spec, context),
            self.norm(config, context),
            GptOssFeedForward(config, context),
        )


class GptOssAttention(Attention):
    """Attention with sinks: see `LayerSpec.sinks`."""

    def __init__(self, config: Any, spec: LayerSpec, context: BuildContext) -> None:
        bias = config.attention_bias
        super().__init__(config.hidden_size, spec, context, bias=bias, output_bias=bias)
        heads = self.attn.spec.heads
        own = Part((spec.heads,), 0, context.parallel.rank * heads, heads)
        self.sinks = Weight((heads,), {None: own}, context)
        self.attn.bind_sinks(self.sinks)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from super().weights(prefix)
        yield WeightRule(f"{prefix}sinks", self.sinks)


class GptOssFeedForward(SparseFeedForward):
    router_name = "router"

    def __init__(self, config: Any, context: BuildContext) -> None:
        hidden = config.hidden_size
        count = config.num_local_experts
        experts = Experts(
            hidden,
            config.intermediate_size,
            count,
            context,
            activation(config),
            bias=True,
            stacked=Stacked(interleaved=True, transposed=True),
            per_token=config.num_experts_per_tok,
        )
        router = Router(hidden, count, context, bias=True)
        super().__init__(router, experts, normalize=True)


def activation(config: Any) -> ClampedSwiGLU:
    """Return the activation of experts; transformers before 5.23 has these two numbers in its code
    instead of its config."""
    return ClampedSwiGLU(
        getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    )
