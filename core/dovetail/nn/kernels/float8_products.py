# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Products of float8 inputs and float8 weights, for numbers of rows at which computing takes longer than reading: inputs are rounded to e4m3, with a
scale per row or per group of a row. Twins: `twin_of_narrowed`, and the format's `dequantized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.rms_norm import normed_row
from dovetail.nn.kernels.row import warps_of_row

LARGEST = 448.0  # finite value of e4m3
NUMBERS = 4096  # numbers per program if rows have groups


@triton.jit
def _narrow(
    x, out, scales, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr
):
    """Narrow some groups of one row; BLOCK is GROUP padded to a power of two."""
    let_next_begin(PDL)
    groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    row, g, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    i = g[:, None] * GROUP + j[None, :]
    mask = (j < GROUP)[None, :] & (i < SIZE)
    wait(PDL)
    values = tl.load(x + row * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    scale = tl.where(largest > 0, tl.div_rn(largest, tl.full([GROUPS], LARGEST, tl.float32)), 1.0)  # round as the twin does
    narrow = tl.clamp(tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)), -LARGEST, LARGEST)
    tl.store(out + row * SIZE + i, narrow.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row * groups + g, scale, mask=g < groups)


def narrowed(x: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / scales rounded to e4m3, float8 [rows, size]; scales float32 [rows], or [rows, size / group] if there are groups) of x [rows, size],
    contiguous. The largest magnitude of a row or group maps to the largest of e4m3. The scale of all zeros is 1."""
    rows, size = x.shape
    own = group or size
    groups = triton.cdiv(size, own)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows, groups) if group else (rows,), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(own)
    at_once = min(triton.next_power_of_2(groups), max(1, NUMBERS // block))
    if rows:
        launch(_narrow, (rows, triton.cdiv(groups, at_once)))(
            x,
            out,
            scales,
            SIZE=size,
            GROUP=own,
            BLOCK=block,
            GROUPS=at_once,
            LARGEST=LARGEST,
            num_warps=warps_of_row(block * at_once),
            **pdl_options(x.device),
        )
    return out, scales


@triton.jit
def _norm_and_narrow(
    x,
    parts,
    weight,
    out,
    scales,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,  # BLOCK if there is one scale per row
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and narrow one row."""
    let_next_begin(PDL)
    values = normed_row(x, parts, weight, part_stride, eps, SIZE, BLOCK, PARTS, PDL)
    groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    values = tl.reshape(values.to(x.dtype.element_ty).to(tl.float32), (BLOCK // GROUP, GROUP))  # round as if stored in between
    largest = tl.max(tl.abs(values), 1)
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    narrow = tl.reshape(tl.clamp(values / scale[:, None], -LARGEST, LARGEST), (BLOCK,))
    row, i, g = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    tl.store(out + row * SIZE + i, narrow.to(out.dtype.element_ty), mask=i < SIZE)
    tl.store(scales + row * groups + g, scale, mask=g < groups)


def normed_and_narrowed(
    x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, eps: float, group: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`narrowed` of the RMS norm, with `weight` [size], of x [rows, size]; `parts` are added to x first, as by `rms_norm.add_and_norm`. `group`: a
    power of two."""
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows, triton.cdiv(size, group)) if group else (rows,), dtype=torch.float32, device=x.device)
    if rows:
        launch(_norm_and_narrow, (rows,))(
            x,
            x if parts is None else parts,
            weight,
            out,
            scales,
            rows * size,
            eps,
            SIZE=size,
            BLOCK=block,
            PARTS=0 if parts is None else len(parts),
            GROUP=min(group, block) or block,
            LARGEST=LARGEST,
            num_warps=warps_of_row(block),
            **pdl_options(x.device),
        )
    return out, scales


def twin_of_narrowed(x: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """`narrowed` in plain torch operations."""
    size = x.shape[1]
    own = group or size
    padded = torch.nn.functional.pad(x.float(), (0, -size % own)).reshape(len(x), -(-size // own), own)
    scales = padded.abs().amax(2) / LARGEST
    scales.masked_fill_(scales == 0, 1.0)
    narrow = (padded / scales[:, :, None]).flatten(1)[:, :size].to(torch.float8_e4m3fn)
    return narrow, scales if group else scales[:, 0]


def linear(
    narrow: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply narrow [rows, inputs] by weight [outputs, inputs], both float8, with x_scales [rows] and scales [outputs] float32 -> [rows, outputs]
    bfloat16."""
    return torch._scaled_mm(narrow, weight.t(), scale_a=x_scales[:, None], scale_b=scales[None, :], bias=bias, out_dtype=dtype, use_fast_accum=True)


def check(device: torch.device) -> None:
    """Raise unless it computes correct values here: not every version of torch can multiply float8 by float8 with row scales on every GPU."""
    numbers = torch.arange(32 * 256, device=device).remainder(7).sub(3).view(32, 256)  # small integers, so that sums are exact
    x, weight = numbers[:20].bfloat16(), numbers.to(torch.float8_e4m3fn)
    ours = linear(*narrowed(x), weight, torch.full((32,), 0.5, device=device), None, x.dtype)
    exact = x.float() @ weight.float().t() * 0.5
    if not torch.allclose(ours.float(), exact, rtol=2**-7, atol=exact.abs().max().item() * 2**-4):
        raise DovetailError("it computes wrong numbers")
