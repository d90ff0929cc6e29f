"""Mistral: the plain decoder, with the same window in every layer or none; in Ministral, some layers have it."""

from __future__ import annotations

from typing import Any

from dovetail_models.arch import (
    DecoderArch,
    base_shape,
    layer_type_reasons,
    window_reasons,
    windows_by_layer_type,
)
from dovetail_models.decoder import DecoderShape


class Mistral(DecoderArch):
    """Serves `MistralForCausalLM`."""

    model_type = "mistral"
    handled = frozenset({"sliding_window"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + window_reasons(config)

    def shape(self, config: Any) -> DecoderShape:
        return base_shape(config, windows=(config.sliding_window,) * config.num_hidden_layers)


class Ministral(DecoderArch):
    """Serves `MinistralForCausalLM`."""

    model_type = "ministral"
    handled = frozenset({"layer_types", "sliding_window"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + layer_type_reasons(config)

    def shape(self, config: Any) -> DecoderShape:
        return base_shape(config, windows=windows_by_layer_type(config))
