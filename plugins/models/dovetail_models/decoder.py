"""The transformer that these models share: pre-norm blocks of grouped-query attention with rotary positions, and of a gated feed-forward.

What one model has and another hasn't is a field of `DecoderShape`; each model's file fills it from its Hugging Face config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.layer import Layer, LayerList
from dovetail.nn.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from dovetail.nn.norm import QKNorm, RMSNorm
from dovetail.nn.parameter import kv_share, share
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rope, RotaryEmbedding, Rotation


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The parameters that decide what a decoder computes, besides its weights. Sizes are of the whole model, not of a rank."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]  # one a layer: how many tokens a query sees, itself included; None: all before it
    rope: Rope
    max_len: int  # tokens, of the longest sequence
    norm_eps: float
    tied: bool  # the head uses the embedding's weights
    qk_norm: bool = False  # q and k of each head are normed before they are turned
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output
    mlp_bias: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def layer_spec(self, index: int, group: ParallelGroup) -> LayerSpec:
        """Layer `index` as this rank computes it. Raises `UnsupportedError` when its heads can't be split over the group."""
        heads, (_, kv_heads) = share(self.heads, group, "num_attention_heads"), kv_share(self.kv_heads, group)
        return LayerSpec(index, heads, kv_heads, self.head_size, self.head_size**-0.5, self.windows[index])


class Attention(nn.Module):
    """Attention over all earlier tokens of the same row, or over those of a window."""

    def __init__(self, index: int, shape: DecoderShape, context: BuildContext) -> None:
        super().__init__()
        hidden, size = shape.hidden_size, shape.head_size
        self.qkv_proj = QKVParallelLinear(hidden, shape.heads, shape.kv_heads, size, context, bias=shape.qkv_bias)
        self.o_proj = RowParallelLinear(shape.heads * size, hidden, context, bias=shape.output_bias)
        spec = shape.layer_spec(index, context.parallel)
        self.qk_norm = QKNorm(spec.heads, spec.kv_heads, size, shape.norm_eps, context) if shape.qk_norm else None
        self.head_size = size
        self.attn = context.make_attention(spec)

    def add_to(self, residual: Residual, norm: RMSNorm, rotation: Rotation, wanted: torch.Tensor | None) -> None:
        qkv = self.qkv_proj(residual, norm).view(len(residual), -1, self.head_size)  # [tokens, heads + 2 * kv_heads, head_size]
        q = rope_and_store_kv(qkv, self.qk_norm, rotation, self.attn)
        out = self.attn.attend(q).flatten(1)
        if wanted is not None:
            residual.keep(wanted)
            out = out.index_select(0, wanted)
        self.o_proj.add_to(residual, out)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: DecoderShape, context: BuildContext) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_up_proj = GateUpParallelLinear(hidden, inner, context, bias=shape.mlp_bias)
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=shape.mlp_bias)

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        self.down_proj.add_to(residual, self.gate_up_proj(residual, norm))


class Block(nn.Module):
    """One layer: attention, then feed-forward. Each reads the residual stream [tokens, hidden] through a norm, and adds to it. `wanted`: attention
    leaves these tokens alone in the stream."""

    def __init__(self, index: int, shape: DecoderShape, context: BuildContext) -> None:
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden_size, shape.norm_eps, context)
        self.attention = Attention(index, shape, context)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_eps, context)
        self.mlp = FeedForward(shape, context)

    def add_to(self, residual: Residual, rotation: Rotation, wanted: torch.Tensor | None = None) -> None:
        self.attention.add_to(residual, self.input_norm, rotation, wanted)
        self.mlp.add_to(residual, self.mlp_norm)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield where the tensors go whose names begin with `prefix`."""
        attention, mlp = self.attention, self.mlp
        parts: dict[str, tuple[Layer, str | None]] = {
            "input_layernorm": (self.input_norm, None),
            "self_attn.q_proj": (attention.qkv_proj, "q"),
            "self_attn.k_proj": (attention.qkv_proj, "k"),
            "self_attn.v_proj": (attention.qkv_proj, "v"),
            "self_attn.o_proj": (attention.o_proj, None),
            "post_attention_layernorm": (self.mlp_norm, None),
            "mlp.gate_proj": (mlp.gate_up_proj, "gate"),
            "mlp.up_proj": (mlp.gate_up_proj, "up"),
            "mlp.down_proj": (mlp.down_proj, None),
        }
        if attention.qk_norm is not None:
            parts |= {"self_attn.q_norm": (attention.qk_norm, "q"), "self_attn.k_norm": (attention.qk_norm, "k")}
        for name, (layer, shard_id) in parts.items():
            for kind, weight in layer.named_parameters():  # "weight", and "bias" if it has one
                yield WeightRule(f"{prefix}{name}.{kind}", weight, shard_id)


class Decoder(nn.Module):
    """The whole model, a `dovetail.api.model.CausalLM`."""

    def __init__(self, shape: DecoderShape, context: BuildContext) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, context)
        self.rotary = RotaryEmbedding(shape.rope, context.max_len or shape.max_len, device=context.device)
        self.blocks = LayerList(Block(index, shape, context) for index in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, context)
        self.head = LMHead(shape.vocab_size, shape.hidden_size, context, tied=self.embedding if shape.tied else None)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        residual, rotation = Residual(self.embedding(token_ids)), self.rotary(positions)
        *earlier, last = self.blocks
        for block in earlier:
            block.add_to(residual, rotation)
        last.add_to(residual, rotation, wanted)
        return residual.normed(self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def weights(self) -> Iterator[WeightRule]:
        """Yield where the tensors of a Hugging Face checkpoint go. A tied head shares the embedding's weight, under either name or both."""
        yield WeightRule("model.embed_tokens.weight", self.embedding.weight)
        yield WeightRule("lm_head.weight", self.head.weight, optional=self.head.weight is self.embedding.weight)
        yield WeightRule("model.norm.weight", self.norm.weight)
        for index, block in enumerate(self.blocks):
            yield from block.weights(f"model.layers.{index}.")
