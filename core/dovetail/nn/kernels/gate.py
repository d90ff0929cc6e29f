# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Fused silu(gate) * up. Twin: `dovetail.nn.activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch

BLOCK = 1024  # numbers written per program
WARPS = 4


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute a part of one row."""
    let_next_begin(PDL)
    wait(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    at = gate_up + row * (2 * SIZE) + i
    gate, up = tl.load(at, mask=mask).to(tl.float32), tl.load(at + SIZE, mask=mask).to(tl.float32)
    tl.store(out + row * SIZE + i, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [tokens, size] for gate_up [tokens, 2 * size], contiguous; computes in float32."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        launch(_silu_mul, (tokens, triton.cdiv(size, BLOCK)))(gate_up, out, SIZE=size, BLOCK=BLOCK, num_warps=WARPS, **pdl_options(out.device))
    return out
