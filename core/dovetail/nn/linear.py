"""Linear layers split over the ranks of a group, the group of one included. Weights are [out, in], as checkpoints have them.

Column-parallel layers give each rank a share of the outputs; a row-parallel layer takes such shares as its input and sums over the ranks.
A column-parallel layer and then a row-parallel one need one all-reduce together (Megatron-LM, arXiv:1909.08053).

What surrounds a layer in a decoder is told to the layer, so that a kernel can do it on the way: the norm of its input, the gate of its outputs, the
residual stream that it adds to. How the weight is stored, and which kernels multiply it, is the business of its `WeightFormat`
(`dovetail.nn.format`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.model import BuildContext
from dovetail.errors import UnsupportedError
from dovetail.nn.activation import ACTIVATIONS, act_mul
from dovetail.nn.format import DENSE, WeightFormat
from dovetail.nn.layer import Layer
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import Part, Weight, kv_share, share, whole
from dovetail.nn.residual import Residual


def linear(
    x: torch.Tensor | Residual,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
    *,
    gated: bool = False,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by plain weights: x [tokens, in] or a residual stream, normed first if there is a norm -> [tokens, out]. `gated`: silu of the first
    half of the outputs, times the second half. `into` [tokens, out]: memory for the result, instead of new."""
    return DENSE.columns(weight, x, bias, norm, gated=gated, into=into)


class LinearLayer(Layer):
    """A layer with a weight [outputs, inputs] in some format. Where a context says that weights come later, it is on the meta device at first, and
    `take_format` gives it memory."""

    weight: Any  # what the format's `allocate` made
    format: WeightFormat = DENSE

    def take_format(self, form: WeightFormat, device: torch.device) -> None:
        """Allocate the weight on `device` as `form` stores it. Raises `UnsupportedError` where a size isn't one that it can store."""
        self.format, self.weight = form, form.allocate(self.weight, device)


@dataclass(frozen=True, slots=True)
class Columns:
    """One of the layers that are computed as one: this rank has outputs [start, start + size) of `out_features`."""

    out_features: int
    start: int
    size: int


class MergedColumnParallelLinear(LinearLayer):
    """Several linear layers of one input, computed as one: their outputs lie beside each other, in the order of `parts` (shard id -> columns).

    x [tokens, in] or a residual stream, normed first if there is a norm -> [tokens, sum of this rank's sizes].
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
        self.weight = Weight((at, in_features), weights, context, later=context.weights_later)
        self.bias = Weight((at,), biases, context) if bias else None

    def forward(self, x: torch.Tensor | Residual, norm: RMSNorm | None = None) -> torch.Tensor:
        return self.format.columns(self.weight, x, self.bias, norm)


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
    """x [tokens, hidden], normed first if there is a norm -> activation(gate(x)) * up(x) [tokens, intermediate / size]. Shard ids: "gate", "up"."""

    def __init__(self, hidden_size: int, intermediate_size: int, context: BuildContext, *, bias: bool, activation: str = "silu") -> None:
        """`activation`: one of `dovetail.nn.activation.ACTIVATIONS`, named as `hidden_act` of a Hugging Face config; silu alone is computed by the
        kernels of the product itself. Raises `UnsupportedError` for another."""
        if activation not in ACTIVATIONS:
            raise UnsupportedError(f"hidden_act = {activation!r} is not implemented (implemented: {', '.join(ACTIVATIONS)})")
        size = share(intermediate_size, context.parallel, "intermediate_size")
        part = Columns(intermediate_size, context.parallel.rank * size, size)
        super().__init__(hidden_size, {"gate": part, "up": part}, context, bias=bias)
        self.activation = activation

    def forward(self, x: torch.Tensor | Residual, norm: RMSNorm | None = None) -> torch.Tensor:
        if self.activation == "silu":
            return self.format.columns(self.weight, x, self.bias, norm, gated=True)
        return act_mul(self.format.columns(self.weight, x, self.bias, norm), self.activation)


class RowParallelLinear(LinearLayer):
    """This rank's share of the inputs [tokens, in / size] -> [tokens, out], summed over the ranks. The first rank adds the bias."""

    def __init__(self, in_features: int, out_features: int, context: BuildContext, *, bias: bool) -> None:
        super().__init__()
        self.group = context.parallel
        size = share(in_features, self.group, "in_features")
        part = Part((out_features, in_features), 1, self.group.rank * size, size)
        self.weight = Weight((out_features, size), {None: part}, context, later=context.weights_later)
        self.bias = whole((out_features,), context) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.format.columns(self.weight, x, self.bias if self.group.rank == 0 else None))

    def add_to(self, residual: Residual, x: torch.Tensor) -> None:
        """The stream gets self(x) [tokens, out]."""
        x = x.contiguous()
        if self.group.size > 1 or self.bias is not None:
            self._add_sum_to(residual, x)
            return
        self.format.add_to(self.weight, residual, x)

    def _add_sum_to(self, residual: Residual, x: torch.Tensor) -> None:
        place = residual.place_of_share(self.group)
        if place is None:
            residual.x.add_(self(x))
        else:
            self.format.columns(self.weight, x, self.bias if self.group.rank == 0 else None, into=place)
