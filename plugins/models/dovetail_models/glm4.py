"""GLM-4 of 2025, dense: what attention and feed-forward add is normed, too, and pairs that rotate
are neighbors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.attention import Attention
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rope, Rotation, rope_from_config
from dovetail_models.arch import DecoderArch, head_size, partial_rope_reasons
from dovetail_models.gemma import GemmaBlock


class NeighborsAttention(Attention):
    """Attention whose pairs that rotate are neighbors, numbers 2i and 2i + 1 of a head. They are
    moved to i and i + rotated / 2, of q and of K alike, which changes no score."""

    def store(
        self, x: torch.Tensor | Residual, norm: Norm | None, rotation: Rotation
    ) -> torch.Tensor:
        spec = self.attn.spec
        qkv = self.qkv_proj(x, norm)
        qkv = qkv.view(len(qkv), -1, spec.head_size)
        rotated = qkv[:, : spec.heads + spec.kv_heads, : rotation.table.shape[1]]
        pairs = rotated.reshape(*rotated.shape[:2], -1, 2)
        rotated.copy_(pairs.transpose(2, 3).flatten(2))
        return rope_and_store_kv(qkv, self.qk_norm, rotation, self.attn)


class Glm4Block(GemmaBlock):
    """`GemmaBlock` under a checkpoint's other names."""

    mlp: GatedFeedForward

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix,
            {
                "input_layernorm": self.input_norm,
                "post_self_attn_layernorm": self.attention_output_norm,
                "post_attention_layernorm": self.mlp_norm,
                "post_mlp_layernorm": self.mlp_output_norm,
            },
        )
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}mlp.", gate="gate_up_proj", up="gate_up_proj")


class Glm4(DecoderArch):
    """Serves `Glm4ForCausalLM`, and the text of `Glm4vForConditionalGeneration` and
    `GlmOcrForConditionalGeneration`."""

    model_type = "glm4"
    handled = frozenset({"attention_bias"})

    def rope_reasons(self, config: Any) -> list[str]:
        return partial_rope_reasons(config, config.rope_parameters or {})

    def rope(self, config: Any, index: int) -> Rope:
        return rope_from_config(config.rope_parameters, head_size(config), partial=True)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Glm4Block:
        hidden = config.hidden_size
        return Glm4Block(
            self.norm(config, context),
            NeighborsAttention(hidden, spec, context, bias=config.attention_bias),
            self.norm(config, context),
            self.norm(config, context),
            GatedFeedForward(hidden, config.intermediate_size, context, stacked=True),
            self.norm(config, context),
        )
