# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Conversion of 4-bit weights to 16 bits, used before products of many rows, where its cost is
small. Twin: `Int4.dequantized`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch

if TYPE_CHECKING:
    from dovetail.nn.kernels.streamed import Stored

OUTPUTS = 64  # per program


@triton.jit
def _widen(
    values,  # see `streamed.Stored`
    scales,
    zeros,
    out,  # [outputs, INPUTS]
    outputs,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Widen 128 inputs of N outputs."""
    let_next_begin(PDL)
    n = tl.program_id(1) * N + tl.arange(0, N)
    chunk = tl.program_id(0)
    j = tl.arange(0, 64)
    exists = (n < outputs)[:, None]
    pairs = tl.load(
        values + n.to(tl.int64)[:, None] * ((INPUTS + 127) // 128 * 64) + chunk * 64 + j[None, :],
        mask=exists,
        other=0,
    )
    wait(PDL)
    for half in tl.static_range(2):
        i = chunk * 128 + half * 64 + j
        mask = exists & (i < INPUTS)[None, :]
        at = (i // GROUP)[None, :] * outputs + n[:, None]
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(zeros + at, mask=mask, other=0).to(tl.int32) if ASYMMETRIC else 8
        small = (pairs >> (4 * half)).to(tl.int32) & 15
        numbers = (small - zero).to(tl.float32) * scale
        tl.store(
            out + n.to(tl.int64)[:, None] * INPUTS + i[None, :],
            numbers.to(out.dtype.element_ty),
            mask=mask,
        )


def widened(weight: Stored, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [outputs, inputs] of a 4-bit weight, rounded to `dtype`."""
    outputs = len(weight.values)
    out = torch.empty((outputs, weight.inputs), dtype=dtype, device=weight.values.device)
    launch(_widen, (triton.cdiv(weight.inputs, 128), triton.cdiv(outputs, OUTPUTS)))(
        weight.values,
        weight.scales,
        weight.values if weight.zeros is None else weight.zeros,
        out,
        outputs,
        INPUTS=weight.inputs,
        GROUP=weight.group,
        ASYMMETRIC=weight.zeros is not None,
        N=OUTPUTS,
        num_warps=4,
        **pdl_options(out.device),
    )
    return out
