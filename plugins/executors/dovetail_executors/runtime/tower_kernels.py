# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Rotation of a tower's queries or keys. Twin, with documentation: `tower_grids.rotated`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.launch import launch


@triton.jit
def _rotated(
    x,  # [tokens, HEADS, 2 * HALF], tokens TOKEN numbers apart
    cos,  # [tokens, 2 * HALF]
    sin,
    out,  # [tokens, HEADS, 2 * HALF]
    TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Compute all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    i = tl.arange(0, PADDED_HALF)[None, :]
    mask = (head < HEADS) & (i < HALF)
    at = head * (2 * HALF) + i
    left = tl.load(x + token * TOKEN + at, mask=mask).to(tl.float32)
    right = tl.load(x + token * TOKEN + at + HALF, mask=mask).to(tl.float32)
    angle = token * (2 * HALF) + i
    left_cos = tl.load(cos + angle, mask=i < HALF).to(tl.float32)
    left_sin = tl.load(sin + angle, mask=i < HALF).to(tl.float32)
    right_cos = tl.load(cos + angle + HALF, mask=i < HALF).to(tl.float32)
    right_sin = tl.load(sin + angle + HALF, mask=i < HALF).to(tl.float32)
    to = out + token * (HEADS * 2 * HALF) + at
    tl.store(to, left * left_cos - right * left_sin, mask=mask)
    tl.store(to + HALF, right * right_cos + left * right_sin, mask=mask)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(_rotated, (tokens,))(
        x,
        cos,
        sin,
        out,
        TOKEN=x.stride(0),
        HEADS=heads,
        HALF=size // 2,
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_HALF=triton.next_power_of_2(size // 2),
        num_warps=4,
    )
    return out
