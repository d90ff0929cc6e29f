"""Linear layers split over the ranks of a group, the group of one included. Weights are [out, in], as checkpoints have them.

Column-parallel layers give each rank a share of the outputs; a row-parallel layer takes such shares as its input and sums over the ranks.
A column-parallel layer and then a row-parallel one need one all-reduce together (Megatron-LM, arXiv:1909.08053).

What surrounds a layer in a decoder is told to the layer, so that a kernel can do it on the way: the norm of its input, the gate of its outputs, the
residual stream that it adds to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from dovetail.api.model import BuildContext
from dovetail.errors import UnsupportedError
from dovetail.nn.activation import ACTIVATIONS, act_mul, silu_mul
from dovetail.nn.kernels.available import has_many_rows, use_kernels
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.layer import Layer
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import Part, Weight, kv_share, share, whole
from dovetail.nn.residual import Residual

FEW_ROWS = 16  # with more, torch's products are as quick
FEW_ROWS_BESIDE_MANY = 8  # with more, the kernel for many rows is quicker, where there is one
Kernel = Callable[..., torch.Tensor]  # called as `kernels.one_row.linear`


def linear(
    x: torch.Tensor | Residual, weight: torch.Tensor, bias: torch.Tensor | None = None, norm: RMSNorm | None = None, *, gated: bool = False
) -> torch.Tensor:
    """x [tokens, in] or a residual stream, normed first if there is a norm -> [tokens, out]. `gated`: silu of the first half of the outputs, times
    the second half."""
    stream = x if isinstance(x, Residual) else Residual(x.contiguous())
    if kernel := kernel_for_few(len(stream), weight, gated):
        with suppress(KernelUnavailable):
            return kernel(stream.x, weight, bias, norm=None if norm is None else (norm.weight, norm.eps), gated=gated)
    x = stream.x if norm is None else stream.normed(norm)
    if kernel := kernel_for_many(len(x), weight, gated):
        with suppress(KernelUnavailable):
            return kernel(x, weight, bias, gated=gated)
    y = F.linear(x, weight, bias)
    return silu_mul(y) if gated else y


def kernel_for_few(rows: int, weight: torch.Tensor, gated: bool = False) -> Kernel | None:
    """Return a kernel that is quicker than torch for so few rows, or None."""
    if rows > FEW_ROWS or not _on_matrix_units(weight) or (rows > FEW_ROWS_BESIDE_MANY and has_many_rows(weight.device)):
        return None
    from dovetail.nn.kernels import few_rows, one_row

    if rows == 1:
        return one_row.linear
    gpu = gpu_of(weight.device)
    tiling = few_rows.tiling_for(weight, rows, gated) if gpu is None or gpu.has_matrix_units else None
    return None if tiling is None else partial(few_rows.linear, tiling=tiling)


def kernel_for_many(rows: int, weight: torch.Tensor, gated: bool = False, in_parts: bool = False) -> Kernel | None:
    """Return a kernel that is quicker than torch for more rows, or None. It is called like `kernels.many_rows.linear`."""
    if not _on_matrix_units(weight) or not has_many_rows(weight.device):
        return None
    from dovetail.nn.kernels import many_rows

    tiling = many_rows.tiling_for(weight, rows, gated=gated, in_parts=in_parts) if rows > FEW_ROWS_BESIDE_MANY else None
    return None if tiling is None else partial(many_rows.linear, tiling=tiling)


def _on_matrix_units(weight: torch.Tensor) -> bool:
    """True if a kernel may use matrix units for this weight: they would round float32."""
    return weight.dtype in (torch.bfloat16, torch.float16) and use_kernels(weight)


@dataclass(frozen=True, slots=True)
class Columns:
    """One of the layers that are computed as one: this rank has outputs [start, start + size) of `out_features`."""

    out_features: int
    start: int
    size: int


class MergedColumnParallelLinear(Layer):
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
        self.weight = Weight((at, in_features), weights, context)
        self.bias = Weight((at,), biases, context) if bias else None

    def forward(self, x: torch.Tensor | Residual, norm: RMSNorm | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, norm)


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
            return linear(x, self.weight, self.bias, norm, gated=True)
        return act_mul(linear(x, self.weight, self.bias, norm), self.activation)


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
        return self.group.all_reduce(linear(x, self.weight, self.bias if self.group.rank == 0 else None))

    def add_to(self, residual: Residual, x: torch.Tensor) -> None:
        """The stream gets self(x) [tokens, out]."""
        x = x.contiguous()
        if self.group.size > 1 or self.bias is not None:
            residual.x.add_(self(x))
            return
        with suppress(KernelUnavailable):
            if kernel := kernel_for_few(len(x), self.weight):
                kernel(x, self.weight, out=residual.x)
                return
            if kernel := kernel_for_many(len(x), self.weight, in_parts=True):
                residual.add_parts(kernel(x, self.weight, in_parts=True))
                return
        residual.x.addmm_(x, self.weight.t())
