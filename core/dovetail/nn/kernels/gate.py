# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Fused silu(gate) * up, and x * sigmoid(gate). Twins: `dovetail.nn.activation`."""

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
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    at = gate_up + row * (2 * SIZE) + i
    gate = tl.load(at, mask=mask).to(tl.float32)
    up = tl.load(at + SIZE, mask=mask).to(tl.float32)
    tl.store(out + row * SIZE + i, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@triton.jit
def _sigmoid_mul(x, gate, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute a part of one row."""
    let_next_begin(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    at = x + row * SIZE + i
    values = tl.load(at, mask=mask).to(tl.float32)
    gates = tl.load(gate + row * stride + i, mask=mask).to(tl.float32)
    tl.store(at, values / (1.0 + tl.exp(-gates)), mask=mask)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply x [tokens, size], contiguous, by sigmoid(gate) in place; a row's numbers of gate
    [tokens, size] are contiguous."""
    tokens, size = x.shape
    if tokens:
        grid = (tokens, triton.cdiv(size, BLOCK))
        launch(_sigmoid_mul, grid)(
            x,
            gate,
            gate.stride(0),
            SIZE=size,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **pdl_options(x.device),
        )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [tokens, size] for gate_up [tokens, 2 * size], contiguous; computes in
    float32."""
    tokens = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        launch(_silu_mul, (tokens, triton.cdiv(size, BLOCK)))(
            gate_up, out, SIZE=size, BLOCK=BLOCK, num_warps=WARPS, **pdl_options(out.device)
        )
    return out
