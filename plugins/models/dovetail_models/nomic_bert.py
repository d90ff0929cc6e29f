"""Nomic's BERT (arXiv:2402.01613): BERT with rotary positions and a gated feed-forward, without
biases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelInputs, ModelPooling, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.embedding import Table, VocabParallelEmbedding
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
from dovetail_models.arch import head_size
from dovetail_models.encoder import EncoderArch, kept, rules

# keys of the published config, which transformers doesn't read -> the field that has their value
_SAME = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
}
# or the only values that are implemented
_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "scale_attn_weights": (True,),
    **dict.fromkeys(("causal", "prenorm", "parallel_block", "parallel_block_tied_norm"), (False,)),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False,)),
    **dict.fromkeys(("rotary_emb_interleaved", "use_rms_norm"), (False,)),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx",), (False,)),
}
# or that change no states
_OF_OTHERS = {
    *("n_positions", "max_trained_positions", "pad_vocab_size_multiple", "dense_seq_output"),
    *("fused_bias_fc", "fused_dropout_add_ln", "use_flash_attn", "use_xentropy"),
    *("reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
}


class NomicBert(EncoderArch):
    """NomicBertModel."""

    capabilities = replace(EncoderArch.capabilities, types=True)
    model_type = "nomic_bert"
    activations = ("silu",)
    prefix = ""
    handled = frozenset(
        {
            *("type_vocab_size", "layer_norm_eps", "head_dim", "rotary_emb_base"),
            *_SAME,
            *_FIXED,
            *_OF_OTHERS,
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        for name, field in _SAME.items():
            other = getattr(config, field)
            if (value := getattr(config, name, other)) != other:
                reasons.append(f"{name} = {value!r}, and {field} = {other!r}, which is read")
        for name, values in _FIXED.items():
            if (value := getattr(config, name, values[0])) not in values:
                reasons.append(f"{name} = {value!r} is not implemented (only {values[0]!r})")
        theta = (config.rope_parameters or {}).get("rope_theta")
        if (base := getattr(config, "rotary_emb_base", theta)) != theta:
            reasons.append(f"rotary_emb_base = {base!r}, and rope_theta = {theta!r}, which is read")
        if not reasons and head_size(config) % 2:
            reasons.append(f"the size of a head, {head_size(config)}, must be even")
        return reasons

    def head_size(self, config: Any) -> int:
        return head_size(config)

    def rope_reasons(self, config: Any) -> list[str]:
        return rope_reasons_against(config.rope_parameters or {})

    def classifier(self, config: Any) -> ModelPooling:
        raise UnsupportedError("NomicBertForSequenceClassification isn't served")

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return NomicBertEncoder(config, specs, context)


class NomicBertLayer(nn.Module):
    """Attention, then feed-forward; each adds its input, and a norm follows."""

    def __init__(self, config: Any, spec: LayerSpec, context: BuildContext) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        whole = config.num_attention_heads * spec.head_size
        own = spec.heads * spec.head_size
        rank = context.parallel.rank
        parts: dict[str | None, Columns] = {
            name: Columns(3 * whole, index * whole + rank * own, own)
            for index, name in enumerate("qkv")
        }
        self.qkv_proj = MergedColumnParallelLinear(hidden, parts, context, bias=False)
        self.attn = context.make_attention(spec)
        self.o_proj = RowParallelLinear(whole, hidden, context, bias=False)
        self.attention_norm = LayerNorm(hidden, config.layer_norm_eps, context, bias=True)
        self.gate_up_proj = GateUpParallelLinear(hidden, inner, context, bias=False)
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=False)
        self.output_norm = LayerNorm(hidden, config.layer_norm_eps, context, bias=True)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """x [tokens, hidden] -> the same; with `wanted` [n], only these tokens' [n, hidden]."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.attn.spec.head_size)
        attended = self.attn.attend(rope_and_store_kv(qkv, None, rotation, self.attn)).flatten(1)
        attended, x = kept(wanted, attended, x)
        x = self.attention_norm(self.o_proj(attended).add_(x))
        return self.output_norm(self.down_proj(self.gate_up_proj(x)).add_(x))

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from rules(
            prefix,
            {
                "attn.out_proj": (self.o_proj, None),
                "norm1": (self.attention_norm, None),
                "mlp.fc11": (self.gate_up_proj, "up"),
                "mlp.fc12": (self.gate_up_proj, "gate"),
                "mlp.fc2": (self.down_proj, None),
                "norm2": (self.output_norm, None),
            },
        )
        for part in "qkv":
            yield from rules(prefix, {"attn.Wqkv": (self.qkv_proj, part)})


class NomicBertEncoder(nn.Module):
    """The encoder."""

    def __init__(self, config: Any, specs: list[LayerSpec], context: BuildContext) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.words = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.types = Table(config.type_vocab_size, hidden, context)
        self.norm = LayerNorm(hidden, config.layer_norm_eps, context, bias=True)
        rope = rope_from_config(config.rope_parameters, specs[0].head_size)
        max_len = context.max_len or model_length(config)
        self.rotary = RotaryEmbedding(rope, max_len, device=context.device)
        self.layers = LayerList(NomicBertLayer(config, spec, context) for spec in specs)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """See `CausalLM.forward`. Each row is whole."""
        rotation = self.rotary(inputs.positions)
        types = inputs.types
        of_types = self.types.weight[0] if types is None else self.types(types)
        x = self.norm(self.words(inputs.token_ids) + of_types)
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, rotation, inputs.wanted if index == len(self.layers) else None)
        return x

    def weights(self) -> Iterator[WeightRule]:
        yield from rules(
            "",
            {
                "embeddings.word_embeddings": (self.words, None),
                "embeddings.token_type_embeddings": (self.types, None),
                "emb_ln": (self.norm, None),
            },
        )
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"encoder.layers.{index}.")
        # of the first token, for labels
        yield WeightRule("pooler.*", None, optional=True)
