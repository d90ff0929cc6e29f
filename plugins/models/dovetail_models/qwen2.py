"""Qwen2 and Qwen2.5 (dense): q, k and v have biases, attention's output has none; later layers may
have a window."""

from __future__ import annotations

from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail_models.arch import DecoderArch, layer_type_reasons, window_of_layer_type


class Qwen2(DecoderArch):
    """Serves `Qwen2ForCausalLM`."""

    model_type = "qwen2"
    handled = frozenset(
        {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + layer_type_reasons(config)

    def window(self, config: Any, index: int) -> int | None:
        return window_of_layer_type(config, index)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Attention]:
        return Block(
            self.norm(config, context),
            Attention(config.hidden_size, spec, context, bias=True),
            self.norm(config, context),
            GatedFeedForward(config.hidden_size, config.intermediate_size, context),
        )
