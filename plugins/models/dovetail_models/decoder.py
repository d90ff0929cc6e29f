"""Transformer shared by these models: pre-norm blocks of grouped-query attention with rotary embeddings, and a gated feed-forward or a mixture
of them.

Differences between models are fields of `DecoderShape`; each model's file fills it from its Hugging Face config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.nn.activation import RELU2, Activation, sigmoid_mul
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.layer import Layer, LayerList
from dovetail.nn.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from dovetail.nn.moe import Experts, Router, Stacked, choose
from dovetail.nn.norm import QKNorm, RMSNorm
from dovetail.nn.parameter import Part, Weight, kv_share, share
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rope, RotaryEmbedding, Rotation
from dovetail_models.grouped import GroupedRouter, Grouping
from dovetail_models.latent import LatentAttention, LatentShape


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Hyperparameters of mixtures of experts."""

    layers: frozenset[int]  # layers with experts; the others are dense
    count: int
    per_token: int
    inner: int
    normalize: bool  # normalize the weights of a token's experts to a sum of 1
    bias: bool = False  # of the router and of experts
    activation: Activation = "silu"
    stacked: Stacked | None = None  # the checkpoint has one tensor for all experts
    router: str = "gate"  # its name in a checkpoint
    shared_inner: int = 0  # of a feed-forward that all tokens go through besides
    shared: str = "shared_experts"  # its name in a checkpoint
    shared_gate: bool = (
        False  # each token multiplies what it gets of that feed-forward by the sigmoid of a logit
    )
    grouping: Grouping | None = None  # None: the experts with the largest logits


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Hyperparameters of a decoder. Sizes are those of the whole model, not of a rank."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    windows: tuple[
        int | None, ...
    ]  # by layer: tokens that a query attends to, itself included; None: all up to itself
    rope: Rope
    max_len: int  # tokens of the longest sequence
    norm_eps: float
    tied: bool  # the head uses the embedding's weights
    qk_norm: bool = False  # norm q and k of each head before the rotary embedding
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    sinks: bool = False  # see `LayerSpec.sinks`
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None  # attention over latents; kv_heads and head_size don't apply
    unused_layers: int = 0  # that checkpoints have after the last, to predict further tokens
    scale: float | None = None  # of attention scores; None: head_size**-0.5
    softcap: float | None = None  # of attention scores: see `LayerSpec.softcap`
    logit_softcap: float | None = None  # a logit x becomes logit_softcap * tanh(x / logit_softcap)
    activation: str = "silu"  # of dense feed-forwards; `RELU2`: they have no gate
    embedding_scale: float = 1.0  # multiplies embeddings, rounded to their dtype
    sandwich: bool = False  # also norm what attention and feed-forward add to the residual stream
    norms_around_one: bool = (
        False  # norms multiply by 1 + w for w in the checkpoint; their weights are kept in float32
    )
    layers: tuple[
        DecoderShape, ...
    ] = ()  # by layer, if rotary embeddings or heads of K and V differ between layers
    shares: int | None = None  # a layer's: see `LayerSpec.shares`
    v_is_k: bool = False  # V is made of K's projection, before K's norm and rotation
    v_norm: bool = False  # norm the heads of V, without a weight
    gated: bool = False  # attention's output is multiplied by the sigmoid of a gate, which the checkpoint has with q
    mlp_stacked: bool = False  # gate and up of dense feed-forwards are one tensor of the checkpoint
    logit_divisor: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def ropes(self) -> list[Rope]:
        """All different rotary embeddings."""
        return list(dict.fromkeys(shape.rope for shape in self.layers or (self,)))

    def layer(self, index: int) -> DecoderShape:
        """Return the shape that layer `index` has."""
        return self.layers[index] if self.layers else self

    def norm(self, context: BuildContext) -> RMSNorm:
        """Return a norm of hidden states."""
        return RMSNorm(self.hidden_size, self.norm_eps, self.of_norms(context))

    def of_norms(self, context: BuildContext) -> BuildContext:
        """Return the context to build norms in: 1 + w has more digits than w."""
        return replace(context, dtype=torch.float32) if self.norms_around_one else context

    def layer_spec(self, index: int, group: ParallelGroup) -> LayerSpec:
        """Return layer `index` with this rank's heads. Raises `UnsupportedError` if the heads can't be split over the group."""
        if self.latent is not None:
            return self.latent.layer_spec(index, self.heads, group)
        shape = self.layer(index)
        heads, (_, kv_heads) = (
            share(shape.heads, group, "num_attention_heads"),
            kv_share(shape.kv_heads, group),
        )
        scale = shape.head_size**-0.5 if shape.scale is None else shape.scale
        return LayerSpec(
            index,
            heads,
            kv_heads,
            shape.head_size,
            scale,
            self.windows[index],
            shape.sinks,
            shape.softcap,
            shares=shape.shares,
        )


class Attention(nn.Module):
    """Attention over all earlier tokens of the same row, or those in a window."""

    def __init__(
        self, index: int, shape: DecoderShape, context: BuildContext, inputs: int | None = None
    ) -> None:
        """`inputs`: width of what q, k and v are projected from; None: the stream's."""
        super().__init__()
        hidden, size, shares = shape.hidden_size, shape.head_size, shape.shares is not None
        self.shape = shape
        kv_heads = 0 if shares else shape.kv_heads
        self.qkv_proj = QKVParallelLinear(
            inputs or hidden,
            shape.heads,
            kv_heads,
            size,
            context,
            bias=shape.qkv_bias,
            gated=shape.gated,
        )
        self.o_proj = RowParallelLinear(shape.heads * size, hidden, context, bias=shape.output_bias)
        spec = shape.layer_spec(index, context.parallel)
        self.qk_norm: QKNorm | None = None
        if shape.qk_norm:
            self.qk_norm = QKNorm(
                spec.heads,
                0 if shares else spec.kv_heads,
                size,
                shape.norm_eps,
                shape.of_norms(context),
            )
        self.output_norm = shape.norm(context) if shape.sandwich else None
        self.attn = context.make_attention(spec)
        self.sinks: Weight | None = None
        if spec.sinks:
            own = Part((shape.heads,), 0, context.parallel.rank * spec.heads, spec.heads)
            self.sinks = Weight((spec.heads,), {None: own}, context)
            self.attn.bind_sinks(self.sinks)

    def store(
        self, x: torch.Tensor | Residual, norm: RMSNorm | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store K and V of x [tokens, inputs]. Returns q [tokens, heads, head_size], and the gate of attention's output, if there is one."""
        qkv = self.qkv_proj(x, norm).view(
            len(x), -1, self.shape.head_size
        )  # [tokens, heads + 2 * kv_heads, head_size]
        gate = None
        if self.shape.gated:
            qkv, gate = qkv.tensor_split((-self.attn.spec.heads,), dim=1)
        if self.shape.v_norm and self.shape.shares is None:
            v = qkv[:, -self.attn.spec.kv_heads :]
            v.copy_(F.rms_norm(v, v.shape[-1:], None, self.shape.norm_eps))
        return rope_and_store_kv(qkv, self.qk_norm, rotation, self.attn), gate

    def add_to(
        self, residual: Residual, norm: RMSNorm, rotation: Rotation, wanted: torch.Tensor | None
    ) -> None:
        self.attend(residual, *self.store(residual, norm, rotation), wanted)

    def attend(
        self,
        residual: Residual,
        q: torch.Tensor,
        gate: torch.Tensor | None,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """Add to the stream what `store` returned q and gate for; reduced to the tokens that are wanted."""
        out = self.attn.attend(q)
        out = out.flatten(1) if gate is None else sigmoid_mul(out.flatten(1), gate.flatten(1))
        if wanted is not None:
            residual.keep(wanted)
            out = out.index_select(0, wanted)
        _add(self.o_proj, residual, out, self.output_norm)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        parts: dict[str, tuple[Layer, str | None]] = {"o_proj": (self.o_proj, None)}
        yield from part_rules(prefix, "q_proj", self.qkv_proj, lambda part: part not in ("k", "v"))
        if self.qk_norm is not None:
            parts["q_norm"] = (self.qk_norm, "q")
        if self.shape.shares is None:
            parts |= {"k_proj": (self.qkv_proj, "k")} | (
                {} if self.shape.v_is_k else {"v_proj": (self.qkv_proj, "v")}
            )
            if self.qk_norm is not None:
                parts["k_norm"] = (self.qk_norm, "k")
            if self.shape.v_is_k:
                yield from _rules(prefix, {"k_proj": (self.qkv_proj, "v")})
        else:
            for name in (
                "k_proj",
                "v_proj",
                "k_norm",
                "v_norm",
            ):  # some checkpoints have them, unused
                yield WeightRule(f"{prefix}{name}.*", None, optional=True)
        yield from _rules(prefix, parts)
        if self.sinks is not None:
            yield WeightRule(f"{prefix}sinks", self.sinks)


def _add(
    layer: RowParallelLinear, residual: Residual, x: torch.Tensor, norm: RMSNorm | None
) -> None:
    """Add layer(x), normed if `norm` is given, to the stream."""
    if norm is None:
        layer.add_to(residual, x)
    else:
        residual.add_parts(norm(layer(x))[None])


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), or without gates down(relu(up(x))²)."""

    def __init__(self, shape: DecoderShape, context: BuildContext) -> None:
        super().__init__()
        hidden, inner, bias, activation = (
            shape.hidden_size,
            shape.intermediate_size,
            shape.mlp_bias,
            shape.activation,
        )
        self.gate_up_proj = self.up_proj = None
        if activation == RELU2:
            self.up_proj = ColumnParallelLinear(hidden, inner, context, bias=bias)
        else:
            self.gate_up_proj = GateUpParallelLinear(
                hidden, inner, context, bias=bias, activation=activation, stacked=shape.mlp_stacked
            )
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=shape.mlp_bias)
        self.output_norm = shape.norm(context) if shape.sandwich else None

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        _add(self.down_proj, residual, self.inner(residual, norm), self.output_norm)

    def inner(self, x: torch.Tensor | Residual, norm: RMSNorm | None = None) -> torch.Tensor:
        """Return the input of `down_proj`."""
        if self.gate_up_proj is not None:
            return self.gate_up_proj(x, norm)
        assert self.up_proj is not None
        return self.up_proj(x, norm).relu_().square_()

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        parts: dict[str, tuple[Layer, str | None]] = {"down_proj": (self.down_proj, None)}
        if self.gate_up_proj is not None:
            parts = {
                "gate_proj": (self.gate_up_proj, "gate"),
                "up_proj": (self.gate_up_proj, "up"),
                **parts,
            }
        if self.up_proj is not None:
            parts = {"up_proj": (self.up_proj, None), **parts}
        yield from _rules(prefix, parts)


class SparseFeedForward(nn.Module):
    """Mixture of experts: the weighted sum of a few feed-forwards, which a router chooses per token, and perhaps of one that all tokens share."""

    def __init__(self, decoder: DecoderShape, shape: ExpertsShape, context: BuildContext) -> None:
        super().__init__()
        self.shape, hidden, grouping = shape, decoder.hidden_size, shape.grouping
        # One more expert, unless adapters may change it: experts aren't linear layers.
        self.merged = (
            shape.shared_gate and shape.shared_inner == shape.inner and not context.adapters
        )
        if grouping is None:
            self.router = Router(hidden, shape.count, context, bias=shape.bias, shared=self.merged)
        else:
            self.router = GroupedRouter(hidden, shape.count, grouping, context)
        self.shared = self.shared_gate = None
        if shape.shared_inner and not self.merged:
            self.shared = FeedForward(
                replace(decoder, intermediate_size=shape.shared_inner), context
            )
            self.shared_gate = Router(hidden, 1, context) if shape.shared_gate else None
        self.experts = Experts(
            hidden,
            shape.inner,
            shape.count,
            context,
            shape.activation,
            shape.bias,
            shape.stacked,
            per_token=shape.per_token,
            shared=self.merged,
        )

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        x = residual.normed(norm)
        if isinstance(self.router, GroupedRouter):
            ids, weights = self.router.choose(
                x, self.shape.per_token, normalize=self.shape.normalize
            )
        else:
            ids, weights = choose(
                self.router(x),
                self.shape.per_token,
                normalize=self.shape.normalize,
                shared=self.merged,
            )
        if self.shared is not None:
            inner = self.shared.inner(x)
            if self.shared_gate is not None:
                inner.mul_(self.shared_gate(x).sigmoid_())
            self.shared.down_proj.add_to(residual, inner)
        self.experts.add_to(residual, x, ids, weights)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from _rules(prefix, {self.shape.router: (self.router, None)})
        if self.merged:
            yield WeightRule(
                f"{prefix}{self.shape.shared}_gate.weight", self.router.weight, "shared"
            )
        if self.shared is not None:
            yield from self.shared.weights(f"{prefix}{self.shape.shared}.")
        if self.shared_gate is not None:
            yield from _rules(prefix, {f"{self.shape.shared}_gate": (self.shared_gate, None)})
        yield from self.experts.weights(f"{prefix}experts.", shared=f"{prefix}{self.shape.shared}.")


def _rules(prefix: str, parts: Mapping[str, tuple[Layer, str | None]]) -> Iterator[WeightRule]:
    """Yield the rules for layers, by their names in a checkpoint."""
    for name, (layer, shard_id) in parts.items():
        for (
            kind,
            weight,
        ) in layer.named_parameters():  # "weight", and "bias" if it has one, or what else
            yield WeightRule(f"{prefix}{name}.{kind}", weight, shard_id)


def part_rules(
    prefix: str, name: str, layer: Layer, of: Callable[[str | None], bool]
) -> Iterator[WeightRule]:
    """Yield the rules for the tensors of a module in a checkpoint, which has all parts of a layer that are `of` it."""
    for kind, weight in layer.named_parameters():
        yield from (
            WeightRule(f"{prefix}{name}.{kind}", weight, part)
            for part in getattr(weight, "parts", {})
            if of(part)
        )


class Block(nn.Module):
    """One layer: attention, then feed-forward. Each reads the residual stream [tokens, hidden] through a norm and adds to it. `wanted`: reduce the
    stream to these tokens after attention."""

    def __init__(self, index: int, decoder: DecoderShape, context: BuildContext) -> None:
        super().__init__()
        shape = decoder.layer(index)
        self.rope = decoder.ropes.index(shape.rope)
        self.input_norm = shape.norm(context)
        if shape.latent is None:
            self.attention: Attention | LatentAttention = Attention(index, shape, context)
        else:
            self.attention = LatentAttention(
                index, shape.hidden_size, shape.heads, shape.latent, context, bias=shape.output_bias
            )
        self.mlp_norm = shape.norm(context)
        experts = (
            shape.experts if shape.experts is not None and index in shape.experts.layers else None
        )
        self.mlp = (
            FeedForward(shape, context)
            if experts is None
            else SparseFeedForward(shape, experts, context)
        )

    def add_to(
        self, residual: Residual, rotations: Sequence[Rotation], wanted: torch.Tensor | None = None
    ) -> None:
        """`rotations`: by the decoder's ropes."""
        self.attention.add_to(residual, self.input_norm, rotations[self.rope], wanted)
        self.mlp.add_to(residual, self.mlp_norm)

    def store(self, residual: Residual, rotations: Sequence[Rotation]) -> None:
        """Store K and V only."""
        self.attention.store(residual, self.input_norm, rotations[self.rope])

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for tensors whose names begin with `prefix`."""
        after = [getattr(part, "output_norm", None) for part in (self.attention, self.mlp)]
        names = _NORMS if after == [None, None] else _SANDWICH_NORMS
        norms = [
            norm
            for norm in (self.input_norm, after[0], self.mlp_norm, after[1])
            if norm is not None
        ]
        yield from _rules(
            prefix, {name: (norm, None) for name, norm in zip(names, norms, strict=True)}
        )
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}mlp.")


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
)  # their names in a checkpoint, in the order of use
_SANDWICH_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Decoder(nn.Module):
    """The whole model, a `dovetail.api.model.CausalLM`."""

    def __init__(self, shape: DecoderShape, context: BuildContext) -> None:
        super().__init__()
        self.shape, self.num_layers, self.hidden_size = shape, shape.num_layers, shape.hidden_size
        self.embedding = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, context)
        self.embedding_scale = rounded(shape.embedding_scale, context)
        max_len = context.max_len or shape.max_len
        self.rotaries = LayerList(
            RotaryEmbedding(rope, max_len, device=context.device) for rope in shape.ropes
        )
        self.blocks = LayerList(self.block(index, context) for index in range(shape.num_layers))
        self.norm = shape.norm(context)
        self.unused = range(shape.num_layers, shape.num_layers + shape.unused_layers)
        self.head = LMHead(
            shape.vocab_size,
            shape.hidden_size,
            context,
            tied=self.embedding if shape.tied else None,
        )

    def block(self, index: int, context: BuildContext) -> Block:
        return Block(index, self.shape, context)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.forward_tapped(token_ids, positions, wanted, ())[0]

    def forward_tapped(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, rotations = self.embed(token_ids), [rotary(positions) for rotary in self.rotaries]
        adders = self.adders(token_ids, x)
        residual = Residual(x)  # changes x
        tapped, reduced = (
            dict[int, torch.Tensor](),
            wanted if not taps or max(taps) <= self.last_mixer else None,
        )
        for index, add_to in enumerate(adders):
            if index in taps:
                tapped[index] = residual.summed().clone()
            add_to(residual, rotations, reduced if index == self.last_mixer else None)
        hidden = residual.normed(self.norm)
        if not taps:
            return hidden, hidden
        tapped[len(self.blocks)] = hidden
        states = (
            tapped[taps[0]] if len(taps) == 1 else torch.cat([tapped[tap] for tap in taps], dim=1)
        )
        return hidden if wanted is None or reduced is not None else hidden.index_select(
            0, wanted
        ), states

    def adders(
        self, token_ids: torch.Tensor, x: torch.Tensor
    ) -> Sequence[Callable[[Residual, Sequence[Rotation], torch.Tensor | None], None]]:
        """Return the `add_to` of each block, for tokens with the embeddings x [tokens, hidden]."""
        return [block.add_to for block in self.blocks]

    @property
    def last_mixer(self) -> int:
        """Index of the last block that mixes tokens; what comes after it needs only those wanted."""
        return len(self.blocks) - 1

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token_ids)
        return x if self.embedding_scale == 1 else x.mul_(self.embedding_scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = self.head(hidden), self.shape.logit_softcap
        if self.shape.logit_divisor != 1:
            logits.div_(self.shape.logit_divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def weights(self) -> Iterator[WeightRule]:
        """Yield the rules for tensors of a Hugging Face checkpoint. A tied head shares the embedding's weight, under either name or both."""
        for rule in self.rules():
            yield replace(rule, transform=one_plus) if self.is_around_one(rule) else rule

    def is_around_one(self, rule: WeightRule) -> bool:
        """Return True if the checkpoint has w for a norm that multiplies by 1 + w."""
        return self.shape.norms_around_one and getattr(rule.parameter, "scale", False)

    def rules(self) -> Iterator[WeightRule]:
        """Yield the rules without the transform of norms."""
        yield WeightRule("model.embed_tokens.weight", self.embedding.weight)
        yield WeightRule(
            "lm_head.weight", self.head.weight, optional=self.head.weight is self.embedding.weight
        )
        yield WeightRule("model.norm.weight", self.norm.weight)
        for index, block in enumerate(self.blocks):
            yield from block.weights(f"model.layers.{index}.")
        for index in self.unused:
            yield WeightRule(f"model.layers.{index}.*", None, optional=True)


def rounded(number: float, context: BuildContext) -> float:
    """Return `number` as the model's dtype holds it: transformers keeps scales of embeddings as tensors of that dtype."""
    return float(torch.tensor(number, dtype=context.dtype))


def one_plus(weight: torch.Tensor) -> torch.Tensor:
    return 1 + weight
