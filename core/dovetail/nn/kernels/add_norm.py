# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Adding to the residual stream and RMSNorm of the sum: each number is read once and written once. Twin: `dovetail.nn.norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS_PER_WARP = 256  # 16 bytes of bfloat16 a thread
MAX_WARPS = 16


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row: a token."""
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    kept = total.to(residual.dtype.element_ty)
    tl.store(residual + at, kept, mask=mask)
    wide = kept.to(tl.float32)  # as rounded: a layer reads what the next one adds to
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(out + at, wide * scale * tl.load(weight + i, mask=mask, other=0.0).to(tl.float32), mask=mask)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x and `residual` [..., size], weight [size], all contiguous -> the norm of the sum. Changes `residual`; computes in float32."""
    size = residual.shape[-1]
    out, block = torch.empty_like(residual), triton.next_power_of_2(size)
    warps = min(MAX_WARPS, max(1, block // NUMBERS_PER_WARP))
    if rows := residual.numel() // size:
        _add_rms_norm[(rows,)](x, residual, weight, out, eps, SIZE=size, BLOCK=block, num_warps=warps)
    return out
