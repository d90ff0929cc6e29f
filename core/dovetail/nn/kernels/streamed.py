# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806 (constants are upper case)
"""Linear layer for few to many rows with low-bit weights: they stream through shared memory as
stored, and are widened in registers right before matrix units multiply them. Twins: `dequantized`
of the formats in `dovetail.nn.format`.

A program computes a tile of the output, transposed, since matrix units take their left operand from
registers. If many inputs share a scale, their sums are scaled instead of the weights, so that no
weight is rounded:

    weights [N outputs, K inputs]  8 or 4 bits → 16 bits ─┐
    inputs  [K inputs, M rows]     16 bits (or 8) ────────┴─▶ sums [N, M] float32, × scales, added up over all K
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import fetch, let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.widening import float8_to_16_bits, pairs_to_16_bits, shifted

CHUNK = 128  # inputs per iteration
PROCESSORS = 132
LEAST_ROWS = 16  # minimum of matrix units
MOST_ROWS = 128  # per tile, with widened weights
MOST_NARROW_ROWS = 512  # in total, for small tiles; above, there are enough large ones
# per program, so that two fit on a processor of a Hopper, and one on an Ada's
SHARED_BYTES = 92 << 10
FETCHED = 8  # chunks in flight before the input is available
MOST_PARTS = 8
ENOUGH = 3 * PROCESSORS // 2  # programs; with that many, inputs aren't split further
LEAST_CHUNKS = 4  # per part


@dataclass(frozen=True, slots=True)
class Tiling:
    """Share of one program: rows, outputs (pairs if gated), number of parts that the inputs are
    split into, and chunks in flight."""

    rows: int
    outputs: int
    parts: int
    stages: int
    warps: int


class Stored(NamedTuple):
    """Weights in the kernel's layout, contiguous.

    8 bits: `values` [outputs, inputs] float8 or int8, `scales` [outputs] float32, or [outputs / n, inputs /
    group] with one for n outputs and `group` inputs. 4 bits: `values` [outputs, inputs / 2] uint8:
    of each 128 inputs, byte j of 64 has input j in its low half and input 64 + j in its high half;
    `scales` and `zeros` (uint8; None: 8 everywhere) [inputs / group, outputs].
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    inputs: int
    group: int  # inputs per scale; 8 bits: 0 if there is one for all inputs

    @property
    def is_int4(self) -> bool:
        return self.values.dtype == torch.uint8


@triton.jit
def _scale_of(
    scales, zeros, n, exists, group, outputs, DTYPE: tl.constexpr, ASYMMETRIC: tl.constexpr
):
    """Load scales and zero points, [groups, outputs], of outputs n for one or several groups of
    inputs."""
    at = group * outputs + n
    scale = tl.load(scales + at, mask=exists, other=0.0).to(tl.float32)
    if ASYMMETRIC:
        zero = shifted(tl.load(zeros + at, mask=exists, other=0), DTYPE)
    else:
        zero = shifted(tl.full(at.shape, 8, tl.uint8), DTYPE)
    return scale, zero


@triton.jit
def _scaled(weights, scales, zeros, n, exists, group, outputs, ASYMMETRIC: tl.constexpr):
    """Return (weights - zero points) * scales for weights [N, 64] of two groups of 32 inputs, from
    `group` on."""
    DTYPE: tl.constexpr = weights.dtype
    both = group + tl.arange(0, 2)
    scale, zero = _scale_of(
        scales, zeros, n[:, None], exists[:, None], both[None, :], outputs, DTYPE, ASYMMETRIC
    )
    spread = tl.reshape(weights, (weights.shape[0], 2, 32))
    spread = (spread - zero[:, :, None]).to(tl.float32) * scale[:, :, None]
    return tl.reshape(spread.to(DTYPE), (weights.shape[0], 64))


@triton.jit
def add_int4(
    sums,
    low,
    high,
    weight,
    scales,
    zeros,
    n,
    exists,
    chunk,
    outputs,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
):
    """Return sums [N, M] plus the products of one chunk; low and high [64, M] are its inputs."""
    j = tl.arange(0, 64)
    pairs = tl.load(
        weight + n.to(tl.int64)[:, None] * BYTES + chunk * 64 + j[None, :],
        mask=exists[:, None],
        other=0,
    )
    low_weights, high_weights = pairs_to_16_bits(pairs, low.dtype)
    if GROUP >= 128:
        scale, zero = _scale_of(
            scales, zeros, n, exists, chunk * 128 // GROUP, outputs, low.dtype, ASYMMETRIC
        )
        products = tl.dot(low_weights - zero[:, None], low)
        products = tl.dot(high_weights - zero[:, None], high, products)
        sums += products * scale[:, None]
    elif GROUP == 64:
        scale, zero = _scale_of(scales, zeros, n, exists, chunk * 2, outputs, low.dtype, ASYMMETRIC)
        sums += tl.dot(low_weights - zero[:, None], low) * scale[:, None]
        scale, zero = _scale_of(
            scales, zeros, n, exists, chunk * 2 + 1, outputs, low.dtype, ASYMMETRIC
        )
        sums += tl.dot(high_weights - zero[:, None], high) * scale[:, None]
    else:  # groups of 32 are too small to scale their sums: scale the weights, which rounds them
        low_weights = _scaled(low_weights, scales, zeros, n, exists, chunk * 4, outputs, ASYMMETRIC)
        high_weights = _scaled(
            high_weights, scales, zeros, n, exists, chunk * 4 + 2, outputs, ASYMMETRIC
        )
        sums = tl.dot(low_weights, low, sums)
        sums = tl.dot(high_weights, high, sums)
    return sums


@triton.jit
def _add_float8(
    sums,
    inputs,
    input_scale,
    weight,
    scales,
    n,
    exists,
    chunk,
    k,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Return sums [N, M] plus the products of one chunk; inputs [K, M]."""
    K: tl.constexpr = inputs.shape[0]
    inside = exists[:, None] & ((k >= 0) if WHOLE else (k < INPUTS))[None, :]
    weights = tl.load(
        weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :], mask=inside, other=0.0
    )
    if weights.dtype == tl.int8:
        weights = weights.to(inputs.dtype)  # exact
    elif not NARROW:
        weights = float8_to_16_bits(weights, inputs.dtype)
    if GROUP == 0:
        sums = tl.dot(weights, inputs, sums)
    else:
        groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        scale = tl.load(
            scales + (n // SHARING) * groups + chunk * K // GROUP, mask=exists, other=0.0
        )[:, None]
        if NARROW:
            scale = scale * input_scale[None, :]
        sums += tl.dot(weights, inputs) * scale
    return sums


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,  # [rows, INPUTS]
    x_scales,  # NARROW: [rows, INPUTS / GROUP] float32, or [rows]
    weight,  # see `Stored`
    scales,
    zeros,
    bias,  # [outputs]; GATED: gates, then ups, as are weights
    out,  # [rows, outputs]; or [parts, rows, outputs], partial sums
    rows,
    outputs,  # GATED: pairs
    INPUTS: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,  # per program
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,  # 8 bits: outputs per scale
    INT4: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    NARROW: tl.constexpr,  # inputs also have 8 bits
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile [N, M] of the output's transpose."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    first = tl.program_id(2) * CHUNKS
    exists = n < outputs
    there = m < rows
    WHOLE: tl.constexpr = INPUTS % K == 0
    BYTES: tl.constexpr = (INPUTS + 127) // 128 * 64 if INT4 else INPUTS
    stored = outputs * 2 if GATED else outputs
    if PDL:  # one load per memory line
        STEP: tl.constexpr = K // 2 if INT4 else K
        line = (
            weight
            + n.to(tl.int64)[:, None] * BYTES
            + first * STEP
            + (tl.arange(0, AHEAD) * STEP)[None, :]
        )
        fetch(tl.where(exists[:, None], line, weight))
        if GATED:
            fetch(tl.where(exists[:, None], line + outputs.to(tl.int64) * BYTES, weight))
    let_next_begin(PDL)
    wait(PDL)
    row = x + m.to(tl.int64)[None, :] * INPUTS
    sums = tl.zeros([N, M], tl.float32)
    ups = tl.zeros([N, M], tl.float32)
    input_scale = tl.full([M], 1.0, tl.float32)
    for chunk in tl.range(first, first + CHUNKS, num_stages=STAGES):
        if INT4:
            k = chunk * K + tl.arange(0, 64)
            low_there = there[None, :] & ((k >= 0) if WHOLE else (k < INPUTS))[:, None]
            high_there = there[None, :] & ((k >= 0) if WHOLE else (k + 64 < INPUTS))[:, None]
            low = tl.load(row + k[:, None], mask=low_there, other=0.0)
            high = tl.load(row + 64 + k[:, None], mask=high_there, other=0.0)
            sums = add_int4(
                sums,
                low,
                high,
                weight,
                scales,
                zeros,
                n,
                exists,
                chunk,
                stored,
                BYTES,
                GROUP,
                ASYMMETRIC,
            )
            if GATED:
                ups = add_int4(
                    ups,
                    low,
                    high,
                    weight,
                    scales,
                    zeros,
                    n + outputs,
                    exists,
                    chunk,
                    stored,
                    BYTES,
                    GROUP,
                    ASYMMETRIC,
                )
        else:
            k = chunk * K + tl.arange(0, K)
            inside = there[None, :] & ((k >= 0) if WHOLE else (k < INPUTS))[:, None]
            inputs = tl.load(row + k[:, None], mask=inside, other=0.0)
            if NARROW and GROUP > 0:
                groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
                input_scale = tl.load(
                    x_scales + m * groups + chunk * K // GROUP, mask=there, other=0.0
                )
            sums = _add_float8(
                sums,
                inputs,
                input_scale,
                weight,
                scales,
                n,
                exists,
                chunk,
                k,
                INPUTS,
                GROUP,
                SHARING,
                WHOLE,
                NARROW,
            )
            if GATED:
                ups = _add_float8(
                    ups,
                    inputs,
                    input_scale,
                    weight,
                    scales,
                    n + outputs,
                    exists,
                    chunk,
                    k,
                    INPUTS,
                    GROUP,
                    SHARING,
                    WHOLE,
                    NARROW,
                )
    if not INT4 and GROUP == 0:
        if NARROW:
            input_scale = tl.load(x_scales + m, mask=there, other=0.0)
        sums *= tl.load(scales + n, mask=exists, other=0.0)[:, None] * input_scale[None, :]
        if GATED:
            ups *= (
                tl.load(scales + n + outputs, mask=exists, other=0.0)[:, None]
                * input_scale[None, :]
            )
    if BIASED:
        sums += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIASED:
            ups += tl.load(bias + outputs + n, mask=exists, other=0.0).to(tl.float32)[:, None]
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    at = (tl.program_id(2) * rows + m).to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(
        out + at, tl.trans(sums).to(out.dtype.element_ty), mask=there[:, None] & exists[None, :]
    )


@cache
def tiling_for(
    rows: int,
    outputs: int,
    inputs: int,
    *,
    int4: bool,
    gated: bool = False,
    in_parts: bool = False,
    narrow: bool = False,
) -> Tiling:
    """Return a tiling for the number of rows (padded to a power of two), outputs (pairs if gated)
    and inputs. `in_parts`: partial sums are allowed. `narrow`: the inputs have 8 bits."""
    if narrow and rows > MOST_NARROW_ROWS:
        return Tiling(128, 64 if gated else 128, 1, 3, 8)
    m = max(LEAST_ROWS, min(MOST_ROWS // (2 if gated and not narrow else 1), rows))
    chunks = ceil(inputs / CHUNK)
    tiles = ceil(rows / m)
    n = 64
    parts = 1
    while (
        in_parts
        and parts < MOST_PARTS
        and tiles * ceil(outputs / n) * parts < ENOUGH
        and chunks % (2 * parts) == 0
    ):
        if chunks // (2 * parts) < LEAST_CHUNKS:
            break
        parts *= 2
    while n > 16 and tiles * ceil(outputs / n) * parts < PROCESSORS * 2 // 3:
        n //= 2
    of_stage = n * (CHUNK // 2 if int4 else CHUNK) * (2 if gated else 1) + m * CHUNK * (
        1 if narrow else 2
    )
    return Tiling(
        m,
        n,
        parts,
        max(2, min(8, SHARED_BYTES // of_stage, chunks // parts + 1)),
        8 if n == 64 and m == 128 else 4,
    )


def linear(
    x: torch.Tensor,
    weight: Stored,
    bias: torch.Tensor | None = None,
    *,
    x_scales: torch.Tensor | None = None,
    gated: bool = False,
    in_parts: bool = False,
    tiling: Tiling | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply x [rows, inputs], contiguous, float16 or bfloat16 -> [rows, outputs] in x's dtype;
    accumulates in float32.

    `gated`: see `one_row.linear`. `in_parts`: return partial sums [parts, rows, outputs] float32
    (see `rms_norm.add_and_norm`). `x_scales` [rows, inputs / group] float32, or [rows] if the
    weight has one per output: multipliers of a float8 x; the result is `dtype`.
    """
    rows, inputs = x.shape
    outputs = weight.values.shape[0] // (2 if gated else 1)
    narrow = x_scales is not None
    if tiling is None:
        padded = max(LEAST_ROWS, triton.next_power_of_2(rows))
        tiling = tiling_for(
            padded,
            outputs,
            inputs,
            int4=weight.is_int4,
            gated=gated,
            in_parts=in_parts,
            narrow=narrow,
        )
    shape, kind = (
        ((tiling.parts, rows, outputs), torch.float32)
        if in_parts
        else ((rows, outputs), dtype or x.dtype)
    )
    out = torch.empty(shape, dtype=kind, device=x.device)
    if not rows:
        return out
    chunk = CHUNK if weight.is_int4 or not weight.group else min(CHUNK, weight.group)
    chunks = ceil(inputs / chunk / tiling.parts)
    launch(
        _linear,
        (triton.cdiv(outputs, tiling.outputs), triton.cdiv(rows, tiling.rows), tiling.parts),
    )(
        x,
        weight.scales if x_scales is None else x_scales,
        weight.values,
        weight.scales,
        weight.values if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
        rows,
        outputs,
        INPUTS=inputs,
        N=tiling.outputs,
        M=tiling.rows,
        K=chunk,
        CHUNKS=chunks,
        GROUP=weight.group,
        SHARING=weight.values.shape[0] // weight.scales.shape[0]
        if weight.scales.ndim == 2 and not weight.is_int4
        else 1,
        INT4=weight.is_int4,
        ASYMMETRIC=weight.zeros is not None,
        NARROW=narrow,
        GATED=gated,
        BIASED=bias is not None,
        AHEAD=min(FETCHED, 1 << (chunks.bit_length() - 1)),
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return out
