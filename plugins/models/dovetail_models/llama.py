"""Llama 2 and 3, and the many models with the same architecture: the plain decoder, with biases if
the config has them."""

from __future__ import annotations

from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.model_files import model_length
from dovetail_models.arch import DecoderArch


class Llama(DecoderArch):
    """Serves `LlamaForCausalLM`."""

    model_type = "llama"
    handled = frozenset({"attention_bias", "mlp_bias", "sliding_window"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) or _stray_window_reasons(config)

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
        bias = config.attention_bias
        return Attention(
            config.hidden_size, spec, context, bias=bias, output_bias=bias, inputs=inputs
        )

    def feed_forward(self, config: Any, context: BuildContext) -> GatedFeedForward:
        hidden = config.hidden_size
        inner = config.intermediate_size
        return GatedFeedForward(hidden, inner, context, bias=config.mlp_bias)


def _stray_window_reasons(config: Any) -> list[str]:
    """Return the reason to reject a window: Llamas have none, but some configs are derived from
    models that do, and engines then differ."""
    window = getattr(config, "sliding_window", None)
    is_off = not window or getattr(config, "use_sliding_window", None) is False
    if is_off or (isinstance(window, int) and window >= model_length(config)):
        return []
    return [
        f"sliding_window = {window!r}: a Llama has none; transformers ignores it, other engines "
        f"don't: "
        "remove it from config.json for transformers' behavior"
    ]
