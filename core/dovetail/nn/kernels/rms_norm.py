# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""RMSNorm that reads its input once, optionally fused with a preceding addition. Twins:
`dovetail.nn.norm`, `dovetail.nn.residual`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row


@triton.jit
def normed_row(
    x,
    parts,
    weight,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return the norm of this program's row of x [rows, SIZE]: [BLOCK] float32, 0 beyond SIZE.
    PARTS are first added to the row in memory."""
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    weights = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    wait(PDL)
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            values += tl.load(parts + part * part_stride + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=mask)
        values = rounded.to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps) * weights


@triton.jit
def _rms_norm(
    x,
    parts,
    weight,
    out,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one row (a token)."""
    let_next_begin(PDL)
    normed = normed_row(x, parts, weight, part_stride, eps, SIZE, BLOCK, PARTS, PDL)
    i = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0).to(tl.int64) * SIZE + i, normed, mask=i < SIZE)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x [..., size] with weight [size], contiguous, in x's shape and dtype;
    computes in float32."""
    return _normed(x, None, weight, eps)


def add_and_norm(
    x: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add the sum of parts [parts, rows, size], float32 or of x's dtype, to x [rows, size] in
    place; return the norm of x. All contiguous."""
    return _normed(x, parts, weight, eps)


def _normed(
    x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    size = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    if rows := x.numel() // size:
        launch(_rms_norm, (rows,))(
            x,
            x if parts is None else parts,
            weight,
            out,
            rows * size,
            eps,
            SIZE=size,
            BLOCK=block,
            PARTS=0 if parts is None else len(parts),
            num_warps=warps_of_row(block),
            **pdl_options(x.device),
        )
    return out
