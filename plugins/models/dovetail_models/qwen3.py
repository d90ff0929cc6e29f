"""Qwen3 (dense): norms q and k of each head before the rotary embedding; later layers may have a
window."""

from __future__ import annotations

from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail_models.arch import DecoderArch, layer_type_reasons, window_of_layer_type


class Qwen3(DecoderArch):
    """Serves `Qwen3ForCausalLM`."""

    model_type = "qwen3"
    handled = frozenset(
        {
            "attention_bias",
            "layer_types",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + layer_type_reasons(config)

    def window(self, config: Any, index: int) -> int | None:
        return window_of_layer_type(config, index)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Attention]:
        return Block(
            self.norm(config, context),
            self.attention(config, spec, context),
            self.norm(config, context),
            self.feed_forward(config, context),
        )

    def attention(
        self, config: Any, spec: LayerSpec, context: BuildContext, inputs: int | None = None
    ) -> Attention:
        """`inputs`: as of `Attention`."""
        return Attention(
            config.hidden_size,
            spec,
            context,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
            inputs=inputs,
        )

    def feed_forward(self, config: Any, context: BuildContext) -> GatedFeedForward:
        return GatedFeedForward(config.hidden_size, config.intermediate_size, context)
