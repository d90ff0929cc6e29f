"""Plain weights, in the model's compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.nn.activation import silu_mul
from dovetail.nn.fixed_shapes import shapes_are_fixed
from dovetail.nn.format.base import WeightFormat, in_one_piece, stacked
from dovetail.nn.kernels import stored_experts
from dovetail.nn.kernels.available import has_many_rows, use_kernels
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Weight
from dovetail.nn.residual import Residual, with_fusable_norm

FEW_ROWS = 16  # above, torch.matmul is as fast
FEW_ROWS_BESIDE_MANY = 8  # above, the kernel for many rows is faster, where available
Kernel = Callable[..., torch.Tensor]  # called as `kernels.one_row.linear`


@dataclass(frozen=True, slots=True)
class Dense(WeightFormat):
    """Unquantized weights. Their twin is torch's matrix product."""

    def allocate(self, weight: Weight, device: torch.device) -> Weight:
        return weight.on(device)

    def allocate_experts(
        self, weights: Sequence[Weight], device: torch.device
    ) -> Sequence[nn.Parameter]:
        return in_one_piece(WeightFormat.allocate_experts(self, weights, device))

    def dequantized(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    def columns(
        self,
        weight: torch.Tensor,
        x: torch.Tensor | Residual,
        bias: torch.Tensor | None = None,
        norm: Norm | None = None,
        *,
        gated: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _on_matrix_units(weight):
            return _plain_columns(weight, x, bias, norm, gated, into)
        stream, norm = with_fusable_norm(x, norm)
        if shapes_are_fixed():
            y = _in_order(weight, stream.read(norm), bias, None if gated else into)
            return silu_mul(y) if gated else y
        if norm is not None and stream.is_pending:
            stream = Residual(stream.normed(norm))
            norm = None
        if kernel := kernel_for_few(len(stream), weight, gated):
            with suppress(KernelUnavailable):
                return kernel(
                    stream.summed(),
                    weight,
                    bias,
                    norm=None if norm is None else (norm.weight, norm.eps),
                    gated=gated,
                    into=into,
                )
        x = stream.read(norm)
        if kernel := kernel_for_many(len(x), weight, gated):
            with suppress(KernelUnavailable):
                return kernel(x, weight, bias, gated=gated, into=into)
        return _plain_columns(weight, x, bias, None, gated, into)

    def add_to(self, weight: torch.Tensor, residual: Residual, x: torch.Tensor) -> None:
        if shapes_are_fixed() and _on_matrix_units(weight):
            residual.add_parts(_in_order(weight, x, None, None)[None])
        elif not _on_matrix_units(weight) or not _added_by_kernel(weight, residual, x):
            residual.summed().addmm_(x, weight.t())

    def for_kernels(self, weights: Sequence[Any]) -> stored_experts.Stored | None:
        return stored_experts.Stored(stacked(weights), weights[0].shape[1])

    def __str__(self) -> str:
        return "plain"


DENSE = Dense()


def _plain_columns(
    weight: torch.Tensor,
    x: torch.Tensor | Residual,
    bias: torch.Tensor | None,
    norm: Norm | None,
    gated: bool,
    into: torch.Tensor | None,
) -> torch.Tensor:
    """`Dense.columns` by torch's products."""
    if isinstance(x, Residual):
        x = x.read(norm)
    else:
        x = x.contiguous()
        x = x if norm is None else norm(x)
    if into is None or gated:
        y = F.linear(x, weight, bias)
        return silu_mul(y) if gated else y
    if bias is None:
        return torch.mm(x, weight.t(), out=into)
    return torch.addmm(bias, x, weight.t(), out=into)


def _in_order(
    weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, into: torch.Tensor | None
) -> torch.Tensor:
    """`Dense.columns` that adds up over the inputs in their order, so that a row has the same bits
    with any number of rows. So do torch's products of many rows; of few they may split the
    inputs."""
    x = x.contiguous()
    if has_many_rows(weight.device):
        from dovetail.nn.kernels import many_rows

        if (tiling := many_rows.tiling_in_order(weight, len(x))) is not None:
            with suppress(KernelUnavailable):
                return many_rows.linear(x, weight, bias, tiling=tiling, into=into)
    return _plain_columns(weight, x, bias, None, False, into)


def _added_by_kernel(weight: torch.Tensor, residual: Residual, x: torch.Tensor) -> bool:
    """Add x times the weight to the stream by a kernel. Returns False if there is none."""
    with suppress(KernelUnavailable):
        if kernel := kernel_for_few(len(x), weight):
            kernel(x, weight, out=residual.summed())
            return True
        if kernel := kernel_for_many(len(x), weight, in_parts=True):
            residual.add_parts(kernel(x, weight, in_parts=True))
            return True
    return False


def kernel_for_few(rows: int, weight: torch.Tensor, gated: bool = False) -> Kernel | None:
    """Return a kernel that is faster than torch for this small number of rows, or None."""
    if (
        rows > FEW_ROWS
        or not _on_matrix_units(weight)
        or (rows > FEW_ROWS_BESIDE_MANY and has_many_rows(weight.device))
    ):
        return None
    from dovetail.nn.kernels import few_rows, one_row

    if rows == 1:
        return one_row.linear
    gpu = gpu_of(weight.device)
    tiling = (
        few_rows.tiling_for(weight, rows, gated) if gpu is None or gpu.has_matrix_units else None
    )
    return None if tiling is None else partial(few_rows.linear, tiling=tiling)


def kernel_for_many(
    rows: int, weight: torch.Tensor, gated: bool = False, in_parts: bool = False
) -> Kernel | None:
    """Return a kernel that is faster than torch for more rows, or None; same signature as
    `kernels.many_rows.linear`."""
    if not _on_matrix_units(weight) or not has_many_rows(weight.device):
        return None
    from dovetail.nn.kernels import many_rows

    least = 1 if weight.nbytes > many_rows.LARGE_BYTES else FEW_ROWS_BESIDE_MANY
    tiling = (
        many_rows.tiling_for(weight, rows, gated=gated, in_parts=in_parts) if rows > least else None
    )
    return None if tiling is None else partial(many_rows.linear, tiling=tiling)


def _on_matrix_units(weight: torch.Tensor) -> bool:
    """True if kernels may use matrix units for this weight (they would round float32)."""
    return weight.dtype in (torch.bfloat16, torch.float16) and use_kernels(weight)
