"""Mistral: the plain decoder, with the same window in every layer or none; in Ministral, some
layers have it."""

from __future__ import annotations

from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail_models.arch import (
    DecoderArch,
    layer_type_reasons,
    window_of_layer_type,
    window_reasons,
)


class Mistral(DecoderArch):
    """Serves `MistralForCausalLM`."""

    model_type = "mistral"
    handled = frozenset({"sliding_window"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + window_reasons(config)

    def window(self, config: Any, index: int) -> int | None:
        return config.sliding_window  # type: ignore[no-any-return]

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Attention]:
        return Block(
            self.norm(config, context),
            Attention(config.hidden_size, spec, context),
            self.norm(config, context),
            GatedFeedForward(config.hidden_size, config.intermediate_size, context),
        )


class Ministral(Mistral):
    """Serves `MinistralForCausalLM`."""

    model_type = "ministral"
    handled = frozenset({"layer_types", "sliding_window"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        return list(
            dict.fromkeys(super().reasons_against_fields(config) + layer_type_reasons(config))
        )

    def window(self, config: Any, index: int) -> int | None:
        return window_of_layer_type(config, index)
