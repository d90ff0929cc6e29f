"""Llama 2 and 3, and the many models with the same architecture: the plain decoder, with biases if the config has them."""

from __future__ import annotations

from typing import Any

from dovetail.nn.model_files import model_length
from dovetail_models.arch import DecoderArch, base_shape
from dovetail_models.decoder import DecoderShape


class Llama(DecoderArch):
    """Serves `LlamaForCausalLM`."""

    model_type = "llama"
    handled = frozenset({"attention_bias", "mlp_bias", "sliding_window"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) or _stray_window_reasons(config)

    def shape(self, config: Any) -> DecoderShape:
        bias = config.attention_bias
        return base_shape(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _stray_window_reasons(config: Any) -> list[str]:
    """Return the reason to reject a window: Llamas have none, but some configs are derived from models that do, and engines then differ."""
    window = getattr(config, "sliding_window", None)
    if (
        not window
        or getattr(config, "use_sliding_window", None) is False
        or (isinstance(window, int) and window >= model_length(config))
    ):
        return []
    return [
        f"sliding_window = {window!r}: a Llama has none; transformers ignores it, other engines don't: "
        "remove it from config.json for transformers' behavior"
    ]
