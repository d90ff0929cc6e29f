"""Decoder whose layers are of several kinds: attention, Gated DeltaNet and Mamba2, which mix tokens, and feed-forwards, which don't.

Layers that mix tokens have a feed-forward of their own, except in models where each layer is only one of these kinds. The recurrences are those of
`dovetail.nn.state`; here are the products before and after them. Ranks split heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.api.state import StateSpec
from dovetail.errors import UnsupportedError
from dovetail.nn.linear import Columns, MergedColumnParallelLinear, RowParallelLinear, interleaved
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import share
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation
from dovetail.nn.state import DeltaShape, GatedDeltaNet, Mamba2Mixer, Mamba2Shape
from dovetail_models.arch import ShapedArch
from dovetail_models.decoder import (
    Attention,
    Decoder,
    DecoderShape,
    FeedForward,
    SparseFeedForward,
    part_rules,
)

Kind = Literal["attention", "delta", "mamba", "mlp", "experts"]


@dataclass(frozen=True, slots=True)
class Delta:
    """Hyperparameters of Gated DeltaNets. `interleaved`: the checkpoint has the projections of all heads in two tensors, key head by key head."""

    shape: DeltaShape
    eps: float  # of the gated norm
    interleaved: bool

    def on_rank(self, group: ParallelGroup) -> DeltaShape:
        """Return the sizes of this rank. Raises `UnsupportedError` if the heads can't be split."""
        k_heads = share(self.shape.k_heads, group, "linear_num_key_heads")
        return replace(
            self.shape,
            k_heads=k_heads,
            v_heads=share(self.shape.v_heads, group, "linear_num_value_heads"),
        )


@dataclass(frozen=True, slots=True)
class Mamba:
    """Hyperparameters of Mamba2 layers. The gated norm is over the channels of a group."""

    shape: Mamba2Shape
    eps: float  # of the gated norm
    limits: tuple[float, float]  # of time steps
    conv_bias: bool
    bias: bool  # of the projections

    def on_rank(self, group: ParallelGroup) -> Mamba2Shape:
        """Return the sizes of this rank. Raises `UnsupportedError` if heads or groups can't be split."""
        return replace(
            self.shape,
            heads=share(self.shape.heads, group, "Mamba heads"),
            groups=share(self.shape.groups, group, "Mamba groups"),
        )


@dataclass(frozen=True, slots=True)
class HybridShape(DecoderShape):
    kinds: tuple[Kind, ...] = ()  # by layer
    delta: Delta | None = None
    mamba: Mamba | None = None
    single: bool = False  # layers that mix tokens have no feed-forward
    renamed: tuple[
        tuple[str, str], ...
    ] = ()  # parts of names -> what the checkpoint has instead, in this order

    def layer_specs(self, group: ParallelGroup) -> list[LayerSpec]:
        """Return the attention layers, with this rank's heads."""
        return [
            self.layer_spec(index, group)
            for index, kind in enumerate(self.kinds)
            if kind == "attention"
        ]

    def state_specs(self, group: ParallelGroup) -> list[StateSpec]:
        """Return the recurrent layers' states, with this rank's heads."""
        recurrent = {"delta": self.delta, "mamba": self.mamba}
        return [
            part.on_rank(group).spec(index)
            for index, kind in enumerate(self.kinds)
            if (part := recurrent.get(kind)) is not None
        ]


class DeltaMixer(nn.Module):
    """Gated DeltaNet with its projections."""

    def __init__(
        self, index: int, decoder: DecoderShape, delta: Delta, context: BuildContext
    ) -> None:
        super().__init__()
        hidden, group, whole, own = (
            decoder.hidden_size,
            context.parallel,
            delta.shape,
            delta.on_rank(context.parallel),
        )
        keys, values, ratio = (
            own.k_heads * own.k_size,
            own.v_heads * own.v_size,
            own.v_heads // own.k_heads,
        )
        if delta.interleaved:
            pieces = {
                "q": own.k_size,
                "k": own.k_size,
                "v": ratio * own.v_size,
                "z": ratio * own.v_size,
            }
            qkvz = interleaved(pieces, whole.k_heads, group, "linear_num_key_heads")
            ba = interleaved({"b": ratio, "a": ratio}, whole.k_heads, group, "linear_num_key_heads")
        else:
            qkvz = dict(_split({"q": keys, "k": keys, "v": values}, group)) | dict(
                _split({"z": values}, group)
            )
            ba = dict(_split({"b": own.v_heads}, group)) | dict(_split({"a": own.v_heads}, group))
        self.ba_proj: MergedColumnParallelLinear | None = None
        if context.weights_later:  # a checkpoint may store these in another format
            self.ba_proj = MergedColumnParallelLinear(hidden, ba, context, bias=False)
            self.ba_proj.sensitive = True  # few weights, which decide how fast states fade
        self.in_proj = MergedColumnParallelLinear(
            hidden, qkvz | (ba if self.ba_proj is None else {}), context, bias=False
        )
        self.net = GatedDeltaNet(own, delta.eps, context.make_state(own.spec(index)), context)
        self.out_proj = RowParallelLinear(whole.v_heads * whole.v_size, hidden, context, bias=False)
        self.interleaved, self.widths = (
            delta.interleaved,
            [2 * keys + values, values, own.v_heads, own.v_heads],
        )

    def add_to(
        self, residual: Residual, norm: RMSNorm, rotation: Rotation, wanted: torch.Tensor | None
    ) -> None:
        if self.ba_proj is None:
            qkv, z, b, a = torch.split(self.in_proj(residual, norm), self.widths, dim=1)
        else:
            x = residual.normed(norm)
            qkv, z = torch.split(self.in_proj(x), self.widths[:2], dim=1)
            b, a = self.ba_proj(x).chunk(2, dim=1)
        _add(self.out_proj, residual, self.net(qkv, z, b, a), wanted)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        ba_proj = self.in_proj if self.ba_proj is None else self.ba_proj
        if self.interleaved:
            names = {"in_proj_qkvz": (self.in_proj, "qkvz"), "in_proj_ba": (ba_proj, "ba")}
        else:
            names = {"in_proj_qkv": (self.in_proj, "qkv"), "in_proj_z": (self.in_proj, "z")}
            names |= {"in_proj_b": (ba_proj, "b"), "in_proj_a": (ba_proj, "a")}
        for name, (layer, letters) in names.items():
            yield from part_rules(
                prefix,
                name,
                layer,
                lambda part, letters=letters: part is not None and part[0] in letters,  # type: ignore[misc]
            )
        yield from self.net.weights(prefix)
        yield from part_rules(prefix, "out_proj", self.out_proj, lambda part: True)


class MambaMixer(nn.Module):
    """Mamba2 with its projections."""

    def __init__(
        self, index: int, decoder: DecoderShape, mamba: Mamba, context: BuildContext
    ) -> None:
        super().__init__()
        hidden, group, whole, own = (
            decoder.hidden_size,
            context.parallel,
            mamba.shape,
            mamba.on_rank(context.parallel),
        )
        channels, groups = own.heads * own.head_size, own.groups * own.state_size
        parts = dict(
            _split({"z": channels, "x": channels, "B": groups, "C": groups, "dt": own.heads}, group)
        )
        self.in_proj = MergedColumnParallelLinear(hidden, parts, context, bias=mamba.bias)
        self.net = Mamba2Mixer(
            own,
            mamba.eps,
            context.make_state(own.spec(index)),
            context,
            conv_bias=mamba.conv_bias,
            norm_group=whole.heads * whole.head_size // whole.groups,
            limits=mamba.limits,
        )
        self.out_proj = RowParallelLinear(
            whole.heads * whole.head_size, hidden, context, bias=mamba.bias
        )
        self.widths = [channels, own.conv_channels, own.heads]

    def add_to(
        self, residual: Residual, norm: RMSNorm, rotation: Rotation, wanted: torch.Tensor | None
    ) -> None:
        z, conv, dt = torch.split(self.in_proj(residual, norm), self.widths, dim=1)
        _add(self.out_proj, residual, self.net(conv, z, dt), wanted)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from part_rules(prefix, "in_proj", self.in_proj, lambda part: True)
        yield from self.net.weights(prefix)
        yield from part_rules(prefix, "out_proj", self.out_proj, lambda part: True)


def _split(sections: dict[str, int], group: ParallelGroup) -> Iterator[tuple[str | None, Columns]]:
    """Yield the parts of a checkpoint's tensor whose outputs are sections (shard id -> size on this rank), each split over the ranks."""
    total, at = sum(sections.values()) * group.size, 0
    for name, size in sections.items():
        yield name, Columns(total, at * group.size + group.rank * size, size)
        at += size


def _add(
    layer: RowParallelLinear, residual: Residual, x: torch.Tensor, wanted: torch.Tensor | None
) -> None:
    """Add layer(x) to the stream, reduced to the tokens that are wanted."""
    if wanted is not None:
        residual.keep(wanted)
        x = x.index_select(0, wanted)
    layer.add_to(residual, x)


class HybridBlock(nn.Module):
    """One layer: what mixes tokens, a feed-forward, or one after the other. Like `Block` otherwise."""

    def __init__(self, index: int, shape: HybridShape, context: BuildContext) -> None:
        super().__init__()
        kind, experts = shape.kinds[index], shape.experts
        self.mixer: Attention | DeltaMixer | MambaMixer | None = None
        self.mlp: FeedForward | SparseFeedForward | None = None
        if kind == "attention":
            self.mixer = Attention(index, shape, context)
        elif kind == "delta" and shape.delta is not None:
            self.mixer = DeltaMixer(index, shape, shape.delta, context)
        elif kind == "mamba" and shape.mamba is not None:
            self.mixer = MambaMixer(index, shape, shape.mamba, context)
        if self.mixer is None or not shape.single:
            sparse = experts is not None and index in experts.layers
            self.mlp = (
                SparseFeedForward(shape, experts, context)
                if experts is not None and sparse
                else FeedForward(shape, context)
            )
        self.mixer_norm = None if self.mixer is None else shape.norm(context)
        self.mlp_norm = None if self.mlp is None else shape.norm(context)

    def add_to(
        self, residual: Residual, rotations: Sequence[Rotation], wanted: torch.Tensor | None = None
    ) -> None:
        if self.mixer is not None and self.mixer_norm is not None:
            self.mixer.add_to(residual, self.mixer_norm, rotations[0], wanted)
        if self.mlp is not None and self.mlp_norm is not None:
            self.mlp.add_to(residual, self.mlp_norm)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        if self.mixer is not None and self.mixer_norm is not None:
            name = {Attention: "self_attn", DeltaMixer: "linear_attn", MambaMixer: "mamba"}[
                type(self.mixer)
            ]
            yield WeightRule(f"{prefix}input_layernorm.weight", self.mixer_norm.weight)
            yield from self.mixer.weights(f"{prefix}{name}.")
        if self.mlp is not None and self.mlp_norm is not None:
            yield WeightRule(f"{prefix}post_attention_layernorm.weight", self.mlp_norm.weight)
            yield from self.mlp.weights(f"{prefix}mlp.")


class HybridDecoder(Decoder):
    shape: HybridShape
    blocks: Sequence[HybridBlock]  # type: ignore[assignment]

    def __init__(self, shape: HybridShape, context: BuildContext) -> None:
        super().__init__(shape, context)
        self.embedding_scale = (
            shape.embedding_scale
        )  # transformers' code multiplies by a number that isn't rounded

    def block(self, index: int, context: BuildContext) -> HybridBlock:  # type: ignore[override]
        return HybridBlock(index, self.shape, context)

    @property
    def last_mixer(self) -> int:
        return max(index for index, block in enumerate(self.blocks) if block.mixer is not None)

    def rules(self) -> Iterator[WeightRule]:
        for rule in super().rules():
            name = rule.source
            for old, new in self.shape.renamed:
                name = name.replace(old, new)
            yield replace(rule, source=name)
        yield WeightRule("mtp.*", None, optional=True)  # predicts further tokens

    def is_around_one(self, rule: WeightRule) -> bool:
        gated = [
            block.mixer.net.norm_weight
            for block in self.blocks
            if isinstance(block.mixer, DeltaMixer)
        ]
        return super().is_around_one(rule) and all(rule.parameter is not weight for weight in gated)


class HybridArch(ShapedArch):
    """Architecture that is a `HybridDecoder`."""

    kinds: ClassVar[Mapping[str, Kind]]  # by the names of the config's `layer_types`
    sizes: ClassVar[tuple[str, ...]]  # fields with those of recurrent layers

    @abstractmethod
    def shape(self, config: Any) -> HybridShape: ...

    @abstractmethod
    def recurrent(self, config: Any) -> Delta | Mamba:
        """Return the hyperparameters of recurrent layers. Raises `UnsupportedError` for sizes that aren't implemented."""

    def kinds_of(self, config: Any) -> tuple[Kind, ...]:
        return tuple(self.kinds[name] for name in config.layer_types)

    def reasons_against_fields(self, config: Any) -> list[str]:
        names = config.layer_types
        reasons = [
            f"layer_types: {name!r} is not implemented (only {', '.join(self.kinds)})"
            for name in sorted(set(names) - set(self.kinds))
        ]
        if len(names) != config.num_hidden_layers:
            reasons.append(
                f"layer_types has {len(names)} entries, num_hidden_layers is {config.num_hidden_layers}"
            )
        if reasons := [*super().reasons_against_fields(config), *reasons]:
            return reasons
        if "attention" not in self.kinds_of(config):
            reasons.append("layer_types: a model without attention layers is not implemented")
        try:
            self.recurrent(config)
        except UnsupportedError as error:
            reasons.append(
                f"{', '.join(f'{name} = {getattr(config, name)}' for name in self.sizes)}: {error}"
            )
        return reasons

    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        return self.shape(config).layer_specs(parallel)

    def state_specs(self, config: Any, parallel: ParallelGroup) -> list[StateSpec]:
        return self.shape(config).state_specs(parallel)

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        return HybridDecoder(self.shape(config), context)
