"""Qwen2 and Qwen2.5 (dense): q, k and v have biases, attention's output has none; later layers may have a window."""

from __future__ import annotations

from typing import Any

from dovetail_models.arch import DecoderArch, base_shape, layer_type_reasons, windows_by_layer_type
from dovetail_models.decoder import DecoderShape


class Qwen2(DecoderArch):
    """Serves `Qwen2ForCausalLM`."""

    model_type = "qwen2"
    handled = frozenset(
        {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + layer_type_reasons(config)

    def shape(self, config: Any) -> DecoderShape:
        return base_shape(config, windows=windows_by_layer_type(config), qkv_bias=True)
