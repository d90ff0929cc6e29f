"""Linear layers split over the ranks of a group, the group of one included. Weights are [out, in], as checkpoints have them.

Column-parallel layers give each rank a share of the outputs; a row-parallel layer takes such shares as its input and sums over the ranks.
A column-parallel layer and then a row-parallel one need one all-reduce together (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dovetail.api.model import BuildContext
from dovetail.nn.layer import Layer
from dovetail.nn.parameter import Part, Weight, kv_share, share, whole


@dataclass(frozen=True, slots=True)
class Columns:
    """One of the layers that are computed as one: this rank has outputs [start, start + size) of `out_features`."""

    out_features: int
    start: int
    size: int


class MergedColumnParallelLinear(Layer):
    """Several linear layers of one input, computed as one: their outputs lie beside each other, in the order of `parts` (shard id -> columns).

    x [tokens, in] -> [tokens, sum of this rank's sizes].
    """

    def __init__(self, in_features: int, parts: Mapping[str | None, Columns], context: BuildContext, *, bias: bool) -> None:
        super().__init__()
        weights: dict[str | None, Part] = {}
        biases: dict[str | None, Part] = {}
        at = 0
        for shard_id, part in parts.items():
            weights[shard_id] = Part((part.out_features, in_features), 0, part.start, part.size, at)
            biases[shard_id] = Part((part.out_features,), 0, part.start, part.size, at)
            at += part.size
        self.weight = Weight((at, in_features), weights, context)
        self.bias = Weight((at,), biases, context) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """x [tokens, in] -> this rank's share of the outputs [tokens, out / size]."""

    def __init__(self, in_features: int, out_features: int, context: BuildContext, *, bias: bool) -> None:
        size = share(out_features, context.parallel, "out_features")
        super().__init__(in_features, {None: Columns(out_features, context.parallel.rank * size, size)}, context, bias=bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """x [tokens, hidden] -> [tokens, (heads + 2 * kv_heads) * head_size] of this rank's heads: q, then k, then v.

    The arguments are of the whole model. With more ranks than K and V heads, several ranks hold the same one. Shard ids: "q", "k", "v".
    """

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_size: int, context: BuildContext, *, bias: bool) -> None:
        own = share(heads, context.parallel, "num_attention_heads")
        first_kv, own_kv = kv_share(kv_heads, context.parallel)
        q = Columns(heads * head_size, context.parallel.rank * own * head_size, own * head_size)
        kv = Columns(kv_heads * head_size, first_kv * head_size, own_kv * head_size)
        super().__init__(hidden_size, {"q": q, "k": kv, "v": kv}, context, bias=bias)


class GateUpParallelLinear(MergedColumnParallelLinear):
    """x [tokens, hidden] -> [tokens, 2 * intermediate / size]: this rank's gate, then its up. Shard ids: "gate", "up"."""

    def __init__(self, hidden_size: int, intermediate_size: int, context: BuildContext, *, bias: bool) -> None:
        size = share(intermediate_size, context.parallel, "intermediate_size")
        part = Columns(intermediate_size, context.parallel.rank * size, size)
        super().__init__(hidden_size, {"gate": part, "up": part}, context, bias=bias)


class RowParallelLinear(Layer):
    """This rank's share of the inputs [tokens, in / size] -> [tokens, out], summed over the ranks. The first rank adds the bias."""

    def __init__(self, in_features: int, out_features: int, context: BuildContext, *, bias: bool) -> None:
        super().__init__()
        self.group = context.parallel
        size = share(in_features, self.group, "in_features")
        part = Part((out_features, in_features), 1, self.group.rank * size, size)
        self.weight = Weight((out_features, size), {None: part}, context)
        self.bias = whole((out_features,), context) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(F.linear(x, self.weight, self.bias if self.group.rank == 0 else None))
