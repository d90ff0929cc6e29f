"""EuroBERT (arXiv:2503.05500): Llama's layers as an encoder, whose tokens see later ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelInputs, ModelPooling, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.embedding import VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from dovetail.nn.model_files import model_length
from dovetail.nn.norm import RMSNorm
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.rotary import RotaryEmbedding, Rotation, rope_from_config, rope_reasons_against
from dovetail_models.arch import head_size
from dovetail_models.encoder import EncoderArch, kept, rules


class EuroBert(EncoderArch):
    """EuroBertModel."""

    model_type = "eurobert"
    activations = ("silu",)
    handled = frozenset(
        {
            *("rms_norm_eps", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
            *("classifier_pooling", "clf_pooling", "mask_token_id"),  # of heads
        }
    )
    prefix = ""

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if not reasons and head_size(config) % 2:
            reasons.append(f"the size of a head, {head_size(config)}, must be even")
        kv_heads = config.num_key_value_heads
        if kv_heads < 1 or config.num_attention_heads % kv_heads:
            reasons.append(
                f"num_key_value_heads = {kv_heads} must divide num_attention_heads, "
                f"{config.num_attention_heads}"
            )
        return reasons

    def kv_heads(self, config: Any) -> int:
        return int(config.num_key_value_heads)

    def head_size(self, config: Any) -> int:
        return head_size(config)

    def rope_reasons(self, config: Any) -> list[str]:
        return rope_reasons_against(config.rope_parameters or {})

    def classifier(self, config: Any) -> ModelPooling:
        raise UnsupportedError("EuroBertForSequenceClassification isn't served")

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return EuroBertEncoder(config, specs, context)


class EuroBertLayer(nn.Module):
    """Attention, then feed-forward; each reads the stream through a norm, and adds to it."""

    def __init__(self, config: Any, spec: LayerSpec, context: BuildContext) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        size = spec.head_size
        bias = config.attention_bias
        self.attention_norm = RMSNorm(hidden, config.rms_norm_eps, context)
        self.qkv_proj = QKVParallelLinear(hidden, heads, kv_heads, size, context, bias=bias)
        self.attn = context.make_attention(spec)
        self.o_proj = RowParallelLinear(heads * size, hidden, context, bias=bias)
        self.mlp_norm = RMSNorm(hidden, config.rms_norm_eps, context)
        self.gate_up_proj = GateUpParallelLinear(hidden, inner, context, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=config.mlp_bias)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """x [tokens, hidden] -> the same; with `wanted` [n], only these tokens' [n, hidden]."""
        qkv = self.qkv_proj(self.attention_norm(x)).view(len(x), -1, self.attn.spec.head_size)
        attended = self.attn.attend(rope_and_store_kv(qkv, None, rotation, self.attn)).flatten(1)
        attended, x = kept(wanted, attended, x)
        x = self.o_proj(attended).add_(x)
        return self.down_proj(self.gate_up_proj(self.mlp_norm(x))).add_(x)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from rules(
            prefix,
            {
                "input_layernorm": (self.attention_norm, None),
                "self_attn.q_proj": (self.qkv_proj, "q"),
                "self_attn.k_proj": (self.qkv_proj, "k"),
                "self_attn.v_proj": (self.qkv_proj, "v"),
                "self_attn.o_proj": (self.o_proj, None),
                "post_attention_layernorm": (self.mlp_norm, None),
                "mlp.gate_proj": (self.gate_up_proj, "gate"),
                "mlp.up_proj": (self.gate_up_proj, "up"),
                "mlp.down_proj": (self.down_proj, None),
            },
        )


class EuroBertEncoder(nn.Module):
    """The encoder."""

    def __init__(self, config: Any, specs: list[LayerSpec], context: BuildContext) -> None:
        super().__init__()
        self.words = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        rope = rope_from_config(config.rope_parameters, specs[0].head_size)
        max_len = context.max_len or model_length(config)
        self.rotary = RotaryEmbedding(rope, max_len, device=context.device)
        self.layers = LayerList(EuroBertLayer(config, spec, context) for spec in specs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """See `CausalLM.forward`. Each row is whole."""
        rotation = self.rotary(inputs.positions)
        x = self.words(inputs.token_ids)
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, rotation, inputs.wanted if index == len(self.layers) else None)
        return self.norm(x)

    def weights(self) -> Iterator[WeightRule]:
        yield from rules("", {"embed_tokens": (self.words, None), "norm": (self.norm, None)})
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"layers.{index}.")
