# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Products of float8 inputs and float8 weights, for numbers of rows at which computing takes longer
than reading: inputs are rounded to e4m3, with a scale per row or per group of a row. Twins:
`twin_of_narrowed`, and the format's `dequantized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.e4m3 import EVEN, LEAST_NORMAL
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.rms_norm import normed_row
from dovetail.nn.kernels.row import warps_of_row

LARGEST = 448.0  # finite value of e4m3
LOWER = 32  # by which the lower of two numbers is multiplied before it is rounded
NUMBERS = 4096  # numbers per program, if there are more than FULL such programs
FULL = 64
BLOCK = 128  # inputs, and outputs of weights, that share a scale in `linear_of_blocks`
PADDED = 4  # its rows, and the groups of inputs, are multiples of this


@triton.jit(do_not_specialize=["units"])
def _narrow(
    x,
    out,
    scales,  # [units]
    units,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Narrow some units, which are the groups of all rows; BLOCK is GROUP padded to a power of
    two."""
    let_next_begin(PDL)
    groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    j = tl.arange(0, BLOCK)
    in_row = (u % groups * GROUP)[:, None] + j[None, :]
    at = (u // groups).to(tl.int64)[:, None] * SIZE + in_row
    mask = (u < units)[:, None] & (j < GROUP)[None, :] & (in_row < SIZE)
    wait(PDL)
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    # round as the twin does
    scale = tl.where(largest > 0, tl.div_rn(largest, tl.full([UNITS], LARGEST, tl.float32)), 1.0)
    narrow = tl.clamp(
        tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)), -LARGEST, LARGEST
    )
    tl.store(out + at, narrow.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + u, scale, mask=u < units)


def narrowed(x: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / scales rounded to e4m3, float8 [rows, size]; scales float32 [rows], or [rows,
    size / group] if there are groups) of x [rows, size], contiguous. The largest magnitude of a row
    or group maps to the largest of e4m3. The scale of all zeros is 1."""
    rows, size = x.shape
    own = group or size
    groups = triton.cdiv(size, own)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows, groups) if group else (rows,), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(own)
    at_once = max(1, NUMBERS // block) if rows * groups > NUMBERS // block * FULL else 1
    if rows:
        launch(_narrow, (triton.cdiv(rows * groups, at_once),))(
            x,
            out,
            scales,
            rows * groups,
            SIZE=size,
            GROUP=own,
            BLOCK=block,
            UNITS=at_once,
            LARGEST=LARGEST,
            num_warps=warps_of_row(block * at_once),
            **pdl_options(x.device),
        )
    return out, scales


@triton.jit(do_not_specialize=["units", "numbers"])
def _split(
    x,
    out,  # [2, rows, SIZE]
    scales,  # [2, units]
    units,
    numbers,  # of x
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    LOWER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split some units, which are the groups of all rows."""
    let_next_begin(PDL)
    groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    j = tl.arange(0, GROUP)
    in_row = (u % groups * GROUP)[:, None] + j[None, :]
    at = (u // groups).to(tl.int64)[:, None] * SIZE + in_row
    mask = (u < units)[:, None] & (in_row < SIZE)
    wait(PDL)
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    # powers of two: the largest magnitude is moved to between 2 ** 7 and 2 ** 8
    largest = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True)
    power = tl.maximum(largest & 0x7F800000, 22 << 23)
    scale = (power - (7 << 23)).to(tl.float32, bitcast=True)
    values *= (-power + (254 << 23)).to(tl.float32, bitcast=True)[:, None] * 128.0
    # To e4m3 and back, ties to even, by arithmetic: ptxas 12.8 unpacks a wrong register if it merges
    # conversions.
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    rounded = bits.to(tl.float32, bitcast=True)
    middle = 1.5 * EVEN  # float32 on both sides of it are 2 ** -9 apart
    near_zero = (values + middle) - middle
    rounded = tl.where(tl.abs(values) < LEAST_NORMAL, near_zero, rounded)
    high = rounded.to(out.dtype.element_ty)
    low = ((values - rounded) * LOWER).to(out.dtype.element_ty)
    tl.store(out + at, high, mask=mask)
    tl.store(out + numbers + at, low, mask=mask)
    tl.store(scales + u, scale, mask=u < units)
    tl.store(scales + units + u, scale / LOWER, mask=u < units)


def split(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (numbers float8 [2, rows, size], scales float32 [2, rows, size / group]) whose products
    sum up to x [rows, size] bfloat16, contiguous: e4m3 has four bits of a bfloat16's eight. Numbers
    below 2 ** -14 of the largest of a group are rounded by at most 2 ** -22 of it. `group`: a power
    of two."""
    rows, size = x.shape
    groups = triton.cdiv(size, group)
    out = torch.empty((2, rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((2, rows, groups), dtype=torch.float32, device=x.device)
    at_once = max(1, 1024 // group)
    if rows:
        launch(_split, (triton.cdiv(rows * groups, at_once),))(
            x,
            out,
            scales,
            rows * groups,
            rows * size,
            SIZE=size,
            GROUP=group,
            UNITS=at_once,
            LOWER=LOWER,
            num_warps=4,
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
    # round as if stored in between
    values = tl.reshape(values.to(x.dtype.element_ty).to(tl.float32), (BLOCK // GROUP, GROUP))
    largest = tl.max(tl.abs(values), 1)
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    narrow = tl.reshape(tl.clamp(values / scale[:, None], -LARGEST, LARGEST), (BLOCK,))
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    g = tl.arange(0, BLOCK // GROUP)
    tl.store(out + row * SIZE + i, narrow.to(out.dtype.element_ty), mask=i < SIZE)
    tl.store(scales + row * groups + g, scale, mask=g < groups)


def normed_and_narrowed(
    x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, eps: float, group: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`narrowed` of the RMS norm, with `weight` [size], of x [rows, size]; `parts` are added to x
    first, as by `rms_norm.add_and_norm`. `group`: a power of two."""
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(
        (rows, triton.cdiv(size, group)) if group else (rows,), dtype=torch.float32, device=x.device
    )
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
    padded = torch.nn.functional.pad(x.float(), (0, -size % own)).reshape(
        len(x), -(-size // own), own
    )
    scales = padded.abs().amax(2) / LARGEST
    scales.masked_fill_(scales == 0, 1.0)
    narrow = (padded / scales[:, :, None]).flatten(1)[:, :size].to(torch.float8_e4m3fn)
    return narrow, scales if group else scales[:, 0]


def twin_of_split(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`split` in plain torch operations."""
    rows, size = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -size % group)).view(rows, -1, group)
    largest = padded.abs().amax(2).clamp(min=2.0**-105)
    scales = torch.exp2(largest.log2().floor() - 7)
    numbers = padded / scales[:, :, None]
    high = numbers.to(torch.float8_e4m3fn)
    low = ((numbers - high.float()) * LOWER).to(torch.float8_e4m3fn)
    both = torch.stack((high.flatten(1)[:, :size], low.flatten(1)[:, :size]))
    return both, torch.stack((scales, scales / LOWER))


def linear(
    narrow: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply narrow [rows, inputs] by weight [outputs, inputs], both float8, with x_scales [rows]
    and scales [outputs] float32 -> [rows, outputs] bfloat16."""
    return torch._scaled_mm(
        narrow,
        weight.t(),
        scale_a=x_scales[:, None],
        scale_b=scales[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def takes_blocks(weight: torch.Tensor, scales: torch.Tensor, group: int) -> bool:
    """True if `linear_of_blocks` can multiply this weight."""
    outputs, inputs = weight.shape
    return group == BLOCK and len(scales) * BLOCK == outputs and inputs % (PADDED * BLOCK) == 0


def linear_of_blocks(
    narrow: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`linear` with x_scales [rows, inputs / BLOCK] and scales [outputs / BLOCK, inputs / BLOCK],
    for a weight that `takes_blocks`."""
    rows = len(narrow)
    if rows % PADDED:
        narrow = torch.nn.functional.pad(narrow.view(torch.uint8), (0, 0, 0, -rows % PADDED)).view(
            narrow.dtype
        )
        x_scales = torch.nn.functional.pad(x_scales, (0, 0, 0, -rows % PADDED))
    kinds = torch.nn.functional.ScalingType
    by_groups = x_scales.t().contiguous().t()  # rows next to each other
    y = torch.nn.functional.scaled_mm(
        narrow,
        weight.t(),
        by_groups,
        kinds.BlockWise1x128,
        scales.t(),
        kinds.BlockWise128x128,
        output_dtype=dtype,
    )[:rows]
    return y if bias is None else y + bias


def check_blocks(device: torch.device) -> None:
    """Raise unless `linear_of_blocks` computes correct values here: cuBLAS has such products from
    CUDA 12.9 on, for Hopper."""
    numbers = torch.arange(256 * 512, device=device).remainder(7).sub(3).view(256, 512)
    x = numbers[:21].bfloat16()
    weight = numbers.to(torch.float8_e4m3fn)
    x_scales = torch.arange(1, 85, device=device).view(21, 4) / 4
    scales = torch.arange(1, 9, device=device).view(2, 4) / 2
    ours = linear_of_blocks(x.to(torch.float8_e4m3fn), x_scales, weight, scales, None, x.dtype)
    wide = weight.double() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    exact = (x.double() * x_scales.repeat_interleave(BLOCK, 1)) @ wide.t()
    if not torch.allclose(ours.double(), exact, rtol=2**-7, atol=exact.abs().max().item() * 2**-7):
        raise DovetailError("it computes wrong numbers")


def check(device: torch.device) -> None:
    """Raise unless it computes correct values here: not every version of torch can multiply float8
    by float8 with row scales on every GPU."""
    # small integers, so that sums are exact
    numbers = torch.arange(32 * 256, device=device).remainder(7).sub(3).view(32, 256)
    x = numbers[:20].bfloat16()
    weight = numbers.to(torch.float8_e4m3fn)
    ours = linear(*narrowed(x), weight, torch.full((32,), 0.5, device=device), None, x.dtype)
    exact = x.float() @ weight.float().t() * 0.5
    if not torch.allclose(ours.float(), exact, rtol=2**-7, atol=exact.abs().max().item() * 2**-4):
        raise DovetailError("it computes wrong numbers")
