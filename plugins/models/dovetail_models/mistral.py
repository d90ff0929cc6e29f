"""Mistral: the plain decoder, with the same window in every layer or none."""

from __future__ import annotations

from typing import Any

from dovetail_models.arch import DecoderArch, base_shape, window_reasons
from dovetail_models.decoder import DecoderShape


class Mistral(DecoderArch):
    """Serves `MistralForCausalLM`."""

    model_type = "mistral"
    handled = frozenset({"sliding_window"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + window_reasons(config)

    def shape(self, config: Any) -> DecoderShape:
        return base_shape(config, windows=(config.sliding_window,) * config.num_hidden_layers)
