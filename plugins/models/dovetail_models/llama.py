"""Llama 2 and 3, and the many models of their shape: the plain decoder, with biases where the config asks for them."""

from __future__ import annotations

from typing import Any

from dovetail_models.arch import DecoderArch, base_shape
from dovetail_models.decoder import DecoderShape


class Llama(DecoderArch):
    """Serves `LlamaForCausalLM`."""

    model_type = "llama"
    handled = frozenset({"attention_bias", "mlp_bias"})

    def shape(self, config: Any) -> DecoderShape:
        bias = config.attention_bias
        return base_shape(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
