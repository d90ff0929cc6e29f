"""Parts of models whose layers are of several kinds: attention, Gated DeltaNet, Mamba2 and
convolutions, which mix tokens, and feed-forwards, which don't.

The recurrences are those of `dovetail.nn.state`; here are the products before and after them. Ranks
split heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.api.state import StateSpec
from dovetail.errors import UnsupportedError
from dovetail.nn.attention import spec_of_rank
from dovetail.nn.build import of_runtime
from dovetail.nn.layer import Layer
from dovetail.nn.linear import Columns, MergedColumnParallelLinear, RowParallelLinear, interleaved
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import share, weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation
from dovetail.nn.state import DeltaShape, GatedDeltaNet, Mamba2Mixer, Mamba2Shape
from dovetail_models.arch import DecoderArch

Kind = Literal["attention", "delta", "mamba", "conv", "mlp", "experts"]
RECURRENT = ("delta", "mamba", "conv")


class Sizes(Protocol):
    """Sizes of a recurrent layer on this rank."""

    def spec(self, index: int) -> StateSpec:
        """Return the state of layer `index`."""


class Recurrent(Protocol):
    """Hyperparameters of recurrent layers."""

    def on_rank(self, group: ParallelGroup) -> Sizes:
        """Return the sizes of this rank. Raises `UnsupportedError` if they can't be split."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Hyperparameters of Gated DeltaNets. `interleaved`: the checkpoint has the projections of all
    heads in two tensors, key head by key head."""

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
        """Return the sizes of this rank. Raises `UnsupportedError` if heads or groups can't be
        split."""
        return replace(
            self.shape,
            heads=share(self.shape.heads, group, "Mamba heads"),
            groups=share(self.shape.groups, group, "Mamba groups"),
        )


class DeltaMixer(nn.Module):
    """Gated DeltaNet with its projections."""

    name = "linear_attn"

    def __init__(self, hidden: int, index: int, delta: Delta, context: BuildContext) -> None:
        super().__init__()
        group = context.parallel
        whole = delta.shape
        own = delta.on_rank(group)
        keys = own.k_heads * own.k_size
        values = own.v_heads * own.v_size
        ratio = own.v_heads // own.k_heads
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
            qkvz = dict(split({"q": keys, "k": keys, "v": values}, group)) | dict(
                split({"z": values}, group)
            )
            ba = dict(split({"b": own.v_heads}, group)) | dict(split({"a": own.v_heads}, group))
        self.ba_proj: MergedColumnParallelLinear | None = None
        if of_runtime(context).weights_later:  # a checkpoint may store these in another format
            self.ba_proj = MergedColumnParallelLinear(hidden, ba, context, bias=False)
            self.ba_proj.sensitive = True  # few weights, which decide how fast states fade
        self.in_proj = MergedColumnParallelLinear(
            hidden, qkvz | (ba if self.ba_proj is None else {}), context, bias=False
        )
        self.net = GatedDeltaNet(own, delta.eps, context.make_state(own.spec(index)), context)
        self.out_proj = RowParallelLinear(whole.v_heads * whole.v_size, hidden, context, bias=False)
        self.interleaved = delta.interleaved
        self.widths = [2 * keys + values, values, own.v_heads, own.v_heads]

    def add_to(
        self, residual: Residual, norm: Norm, rotation: Rotation, wanted: torch.Tensor | None
    ) -> None:
        """See `Attention.add_to`."""
        if self.ba_proj is None:
            qkv, z, b, a = torch.split(self.in_proj(residual, norm), self.widths, dim=1)
        else:
            x = residual.normed(norm)
            qkv, z = torch.split(self.in_proj(x), self.widths[:2], dim=1)
            b, a = self.ba_proj(x).chunk(2, dim=1)
        self.out_proj.add_to(residual, self.net(qkv, z, b, a), wanted=wanted)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        ba_proj = self.in_proj if self.ba_proj is None else self.ba_proj
        names = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}
        if self.interleaved:
            names = {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}
        layers: dict[str, Layer | tuple[Layer, *tuple[str, ...]]] = {"out_proj": self.out_proj}
        for name, letters in names.items():
            layer = ba_proj if letters[0] in "ba" else self.in_proj
            parts = (part for part in layer.weight.parts if part[0] in letters)
            layers[name] = (layer, *parts)
        yield from weight_rules(prefix, layers)
        yield from self.net.weights(prefix)


class MambaMixer(nn.Module):
    """Mamba2 with its projections."""

    name = "mamba"

    def __init__(self, hidden: int, index: int, mamba: Mamba, context: BuildContext) -> None:
        super().__init__()
        group = context.parallel
        whole = mamba.shape
        own = mamba.on_rank(group)
        channels = own.heads * own.head_size
        groups = own.groups * own.state_size
        parts = dict(
            split({"z": channels, "x": channels, "B": groups, "C": groups, "dt": own.heads}, group)
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
        self, residual: Residual, norm: Norm, rotation: Rotation, wanted: torch.Tensor | None
    ) -> None:
        """See `Attention.add_to`."""
        z, conv, dt = torch.split(self.in_proj(residual, norm), self.widths, dim=1)
        self.out_proj.add_to(residual, self.net(conv, z, dt), wanted=wanted)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        in_proj = (self.in_proj, *self.in_proj.weight.parts)
        yield from weight_rules(prefix, {"in_proj": in_proj, "out_proj": self.out_proj})
        yield from self.net.weights(prefix)


def split(sections: dict[str, int], group: ParallelGroup) -> Iterator[tuple[str | None, Columns]]:
    """Yield the parts of a checkpoint's tensor whose outputs are sections (shard id -> size on this
    rank), each split over the ranks."""
    total = sum(sections.values()) * group.size
    at = 0
    for name, size in sections.items():
        yield name, Columns(total, at * group.size + group.rank * size, size)
        at += size


class HybridArch(DecoderArch):
    """Architecture whose layers are of several kinds."""

    kinds: ClassVar[Mapping[str, Kind]]  # by the names of the config's `layer_types`
    sizes: ClassVar[tuple[str, ...]]  # fields with those of recurrent layers

    @abstractmethod
    def recurrent(self, config: Any) -> Recurrent:
        """Return the hyperparameters of recurrent layers. Raises `UnsupportedError` for sizes that
        aren't implemented."""

    def kinds_of(self, config: Any) -> tuple[Kind, ...]:
        return tuple(self.kinds[name] for name in config.layer_types)

    def reasons_against_fields(self, config: Any) -> list[str]:
        names = config.layer_types or ()
        reasons = [
            f"layer_types: {name!r} is not implemented (only {', '.join(self.kinds)})"
            for name in sorted(set(names) - set(self.kinds))
        ]
        if len(names) != config.num_hidden_layers:
            reasons.append(
                f"layer_types has {len(names)} entries, num_hidden_layers is "
                f"{config.num_hidden_layers}"
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
        return [
            spec_of_rank(self.spec(config, index), parallel)
            for index, kind in enumerate(self.kinds_of(config))
            if kind == "attention"
        ]

    def state_specs(self, config: Any, parallel: ParallelGroup) -> list[StateSpec]:
        shape = self.recurrent(config).on_rank(parallel)
        kinds = enumerate(self.kinds_of(config))
        return [shape.spec(index) for index, kind in kinds if kind in RECURRENT]
