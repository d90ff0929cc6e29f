# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""RMSNorm in one look at its input, and with an addition before it. Twins: `dovetail.nn.norm`, `dovetail.nn.residual`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.chain import chained, let_next_begin, wait
from dovetail.nn.kernels.row import warps_of_row


@triton.jit
def _rms_norm(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """One row: a token."""
    let_next_begin(CHAINED)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    weights = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    wait(CHAINED)
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + at, values * scale * weights, mask=mask)


@triton.jit
def _add_and_norm(x, parts, weight, out, part_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr):
    """One row."""
    let_next_begin(CHAINED)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    weights = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    wait(CHAINED)
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        values += tl.load(parts + part * part_stride + at, mask=mask, other=0.0)
    values = values.to(x.dtype.element_ty)
    tl.store(x + at, values, mask=mask)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + at, values * scale * weights, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size], weight [size], contiguous -> like x; computes in float32."""
    size = x.shape[-1]
    out, block = torch.empty_like(x), triton.next_power_of_2(size)
    if rows := x.numel() // size:
        _rms_norm[(rows,)](x, weight, out, eps, SIZE=size, BLOCK=block, num_warps=warps_of_row(block), **chained(x.device))
    return out


def add_and_norm(x: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, size] += the sum of parts [parts, rows, size] float32; x's norm, like x. All contiguous."""
    rows, size = x.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(size)
    if rows:
        _add_and_norm[(rows,)](
            x, parts, weight, out, rows * size, eps, SIZE=size, BLOCK=block, PARTS=len(parts), num_warps=warps_of_row(block), **chained(x.device)
        )
    return out
