"""Jina embeddings v3 (arXiv:2409.10173): XLM-RoBERTa with rotary positions instead of learned ones,
in transformers' form. Its adapters for tasks change the embedding, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelInputs, ModelPooling, WeightRule
from dovetail.nn.embedding import Table, VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.linear import (
    ColumnParallelLinear,
    Columns,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from dovetail.nn.model_files import model_length
from dovetail.nn.norm import LayerNorm
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.rotary import RotaryEmbedding, Rotation, rope_from_config, rope_reasons_against
from dovetail_models.bert import TWO_LAYERS
from dovetail_models.encoder import EncoderArch, kept, rules


class JinaEmbeddingsV3(EncoderArch):
    """JinaEmbeddingsV3Model, JinaEmbeddingsV3ForSequenceClassification."""

    capabilities = replace(EncoderArch.capabilities, types=True)
    model_type = "jina_embeddings_v3"
    prefix = "roberta."
    handled = frozenset({"type_vocab_size", "layer_norm_eps", "sentence_transformers"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if config.type_vocab_size < 1:
            reasons.append(f"type_vocab_size = {config.type_vocab_size} must be at least 1")
        if not reasons and self.head_size(config) % 2:
            reasons.append(f"the size of a head, {self.head_size(config)}, must be even")
        return reasons

    def rope_reasons(self, config: Any) -> list[str]:
        return rope_reasons_against(config.rope_parameters or {})

    def classifier(self, config: Any) -> ModelPooling:
        return TWO_LAYERS

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return JinaEncoder(config, specs, context, prefix)


class JinaLayer(nn.Module):
    """Attention, then feed-forward; each adds its input, and a norm follows."""

    def __init__(self, config: Any, spec: LayerSpec, context: BuildContext) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        own = spec.heads * spec.head_size
        first = context.parallel.rank * own
        parts: dict[str | None, Columns] = {
            name: Columns(3 * hidden, index * hidden + first, own)
            for index, name in enumerate("qkv")
        }
        self.qkv_proj = MergedColumnParallelLinear(hidden, parts, context, bias=True)
        self.attn = context.make_attention(spec)
        self.o_proj = RowParallelLinear(hidden, hidden, context, bias=True)
        self.attention_norm = LayerNorm(hidden, config.layer_norm_eps, context, bias=True)
        self.up_proj = ColumnParallelLinear(hidden, inner, context, bias=True)
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=True)
        self.output_norm = LayerNorm(hidden, config.layer_norm_eps, context, bias=True)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """x [tokens, hidden] -> the same; with `wanted` [n], only these tokens' [n, hidden]."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.attn.spec.head_size)
        attended = self.attn.attend(rope_and_store_kv(qkv, None, rotation, self.attn)).flatten(1)
        attended, x = kept(wanted, attended, x)
        x = self.attention_norm(self.o_proj(attended).add_(x))
        return self.output_norm(self.down_proj(nn.functional.gelu(self.up_proj(x))).add_(x))

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from rules(
            prefix,
            {
                "mixer.out_proj": (self.o_proj, None),
                "norm1": (self.attention_norm, None),
                "mlp.fc1": (self.up_proj, None),
                "mlp.fc2": (self.down_proj, None),
                "norm2": (self.output_norm, None),
            },
        )
        for part in "qkv":
            yield from rules(prefix, {"mixer.Wqkv": (self.qkv_proj, part)})


class JinaEncoder(nn.Module):
    """The encoder."""

    def __init__(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.prefix = prefix
        self.words = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.types = Table(config.type_vocab_size, hidden, context)
        self.norm = LayerNorm(hidden, config.layer_norm_eps, context, bias=True)
        rope = rope_from_config(config.rope_parameters, specs[0].head_size)
        max_len = context.max_len or model_length(config)
        self.rotary = RotaryEmbedding(rope, max_len, device=context.device)
        self.layers = LayerList(JinaLayer(config, spec, context) for spec in specs)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """See `CausalLM.forward`. Each row is whole. Types are clipped to those that the model
        has."""
        rotation = self.rotary(inputs.positions)
        types = inputs.types
        of_types = (
            self.types.weight[0]
            if types is None
            else self.types(types.clamp(max=len(self.types.weight) - 1))
        )
        x = self.norm(self.words(inputs.token_ids) + of_types)
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, rotation, inputs.wanted if index == len(self.layers) else None)
        return x

    def weights(self) -> Iterator[WeightRule]:
        yield from rules(
            self.prefix,
            {
                "embeddings.word_embeddings": (self.words, None),
                "embeddings.token_type_embeddings": (self.types, None),
                "emb_ln": (self.norm, None),
            },
        )
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{self.prefix}encoder.layers.{index}.")
        # of the first token, for labels
        yield WeightRule(f"{self.prefix}pooler.*", None, optional=True)
