"""ModernBERT (arXiv:2412.13663): pre-norm encoder with rotary positions and gated feed-forwards,
most of whose layers have a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, HeadLayer, ModelInputs, ModelPooling, WeightRule
from dovetail.nn.embedding import VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.linear import (
    Columns,
    GateUpParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from dovetail.nn.model_files import model_length
from dovetail.nn.norm import LayerNorm
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.rotary import RotaryEmbedding, Rotation, rope_from_config, rope_reasons_against
from dovetail_models.arch import layer_type_reasons
from dovetail_models.encoder import EncoderArch, kept, rules


class ModernBert(EncoderArch):
    """ModernBertModel, ModernBertForSequenceClassification."""

    model_type = "modernbert"
    prefix = "model."
    activation_field = "hidden_activation"
    handled = frozenset(
        {
            *(
                "norm_eps",
                "norm_bias",
                "attention_bias",
                "mlp_bias",
                "layer_types",
                "local_attention",
                "global_attn_every_n_layers",
            ),
            *(
                "classifier_pooling",
                "classifier_bias",
                "classifier_activation",
                "sentence_transformers",
            ),  # of the head
            *("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index"),  # of another head
            *(
                "initializer_cutoff_factor",
                "deterministic_flash_attn",
                "reference_compile",
                "repad_logits_with_grad",
            ),
            *("position_embedding_type", "layer_norm_eps"),  # which transformers doesn't read
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = [*super().reasons_against_fields(config), *layer_type_reasons(config)]
        if not reasons and config.hidden_size // config.num_attention_heads % 2:
            reasons.append(
                f"hidden_size / num_attention_heads = "
                f"{config.hidden_size // config.num_attention_heads} must be even"
            )
        if config.local_attention < 2:
            reasons.append(f"local_attention = {config.local_attention} must be at least 2")
        if config.classifier_activation != "gelu":
            reasons.append(
                f"classifier_activation = {config.classifier_activation!r} is not implemented "
                f"(only 'gelu')"
            )
        return reasons

    def rope_reasons(self, config: Any) -> list[str]:
        return [
            f"{kind}: {reason}"
            for kind, one in config.rope_parameters.items()
            for reason in rope_reasons_against(one or {})
        ]

    def window(self, config: Any, index: int) -> int | None:
        return (
            config.local_attention // 2 + 1
            if config.layer_types[index] == "sliding_attention"
            else None
        )

    def classifier(self, config: Any) -> ModelPooling:
        head = (
            HeadLayer("head.dense", "gelu", "head.norm", config.norm_eps),
            HeadLayer("classifier"),
        )
        return ModelPooling(config.classifier_pooling, head)

    def tagger(self, config: Any) -> ModelPooling:
        return self.classifier(config)

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return ModernBertEncoder(config, specs, context, prefix)


class ModernBertLayer(nn.Module):
    """Attention, then feed-forward; each reads the stream through a norm, but the first layer's
    attention, and adds to it."""

    def __init__(self, config: Any, spec: LayerSpec, context: BuildContext) -> None:
        super().__init__()
        hidden = config.hidden_size
        own = spec.heads * spec.head_size
        rank = context.parallel.rank
        self.kind: str = config.layer_types[spec.index]
        parts: dict[str | None, Columns] = {
            name: Columns(3 * hidden, index * hidden + rank * own, own)
            for index, name in enumerate("qkv")
        }
        self.attention_norm = (
            LayerNorm(hidden, config.norm_eps, context, bias=config.norm_bias)
            if spec.index
            else None
        )
        self.qkv_proj = MergedColumnParallelLinear(
            hidden, parts, context, bias=config.attention_bias
        )
        self.attn = context.make_attention(spec)
        self.o_proj = RowParallelLinear(hidden, hidden, context, bias=config.attention_bias)
        self.mlp_norm = LayerNorm(hidden, config.norm_eps, context, bias=config.norm_bias)
        self.gate_up_proj = GateUpParallelLinear(
            hidden,
            config.intermediate_size,
            context,
            bias=config.mlp_bias,
            activation="gelu",
            stacked=True,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, hidden, context, bias=config.mlp_bias
        )

    def forward(
        self, x: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """x [tokens, hidden] -> the same; with `wanted` [n], only these tokens' [n, hidden]."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        qkv = self.qkv_proj(normed).view(len(x), -1, self.attn.spec.head_size)
        attended = self.attn.attend(rope_and_store_kv(qkv, None, rotation, self.attn)).flatten(1)
        attended, x = kept(wanted, attended, x)
        x = self.o_proj(attended).add_(x)
        return self.down_proj(self.gate_up_proj(self.mlp_norm(x))).add_(x)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        norm = {} if self.attention_norm is None else {"attn_norm": (self.attention_norm, None)}
        yield from rules(
            prefix,
            {
                **norm,
                "attn.Wo": (self.o_proj, None),
                "mlp_norm": (self.mlp_norm, None),
                "mlp.Wo": (self.down_proj, None),
            },
        )
        for part in "qkv":
            yield from rules(prefix, {"attn.Wqkv": (self.qkv_proj, part)})
        for part in ("gate", "up"):
            yield from rules(prefix, {"mlp.Wi": (self.gate_up_proj, part)})


class ModernBertEncoder(nn.Module):
    """The encoder."""

    def __init__(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        self.prefix, max_len = prefix, context.max_len or model_length(config)
        self.words = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, context, bias=config.norm_bias)
        ropes = {
            kind: rope_from_config(config.rope_parameters[kind], specs[0].head_size)
            for kind in dict.fromkeys(config.layer_types)
        }
        self.rotaries = nn.ModuleDict(
            {
                kind: RotaryEmbedding(rope, max_len, device=context.device)
                for kind, rope in ropes.items()
            }
        )
        self.layers = LayerList(ModernBertLayer(config, spec, context) for spec in specs)
        self.last_norm = LayerNorm(
            config.hidden_size, config.norm_eps, context, bias=config.norm_bias
        )

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        rotations = {kind: rotary(inputs.positions) for kind, rotary in self.rotaries.items()}
        x = self.norm(self.words(inputs.token_ids))
        for index, layer in enumerate(self.layers, 1):
            wanted = inputs.wanted if index == len(self.layers) else None
            x = layer(x, rotations[layer.kind], wanted)
        return self.last_norm(x)

    def weights(self) -> Iterator[WeightRule]:
        yield from rules(
            self.prefix,
            {"embeddings.tok_embeddings": (self.words, None), "embeddings.norm": (self.norm, None)},
        )
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{self.prefix}layers.{index}.")
        yield from rules(self.prefix, {"final_norm": (self.last_norm, None)})
