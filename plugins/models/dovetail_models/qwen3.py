"""Qwen3 (dense): norms q and k of each head before the rotary embedding, and has an independent head size."""

from __future__ import annotations

from typing import Any

from dovetail_models.arch import DecoderArch, base_shape, layer_type_reasons, windows_by_layer_type
from dovetail_models.decoder import DecoderShape


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

    def shape(self, config: Any) -> DecoderShape:
        bias = config.attention_bias
        return base_shape(
            config,
            windows=windows_by_layer_type(config),
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
        )
