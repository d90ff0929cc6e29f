# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: N803 (constants are upper case)
"""Linear layer of few weights for 2 to 16 rows. Like `one_row`, a program requests all weights of
some outputs before its input is available, and fuses the operations around the layer; but it uses
tensor cores, each warp for a part of the inputs. With more rows or weights, reading all inputs in
every program costs more than this saves. Twin: `dovetail.nn.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.widening import float8_to_16_bits

LEAST_ROWS = 8  # minimum of tensor cores
LEAST_INPUTS = 16  # likewise, per warp
LEAST_OUTPUTS = 8  # per program; with fewer, reading the input dominates
MOST_HELD = 32 * 384  # weights per warp: three quarters of its registers
MOST_CHUNKS = 8  # each chunk is unrolled
MOST_BYTES = 16 << 20  # of a 16-bit layer: about the capacity of all multiprocessors of a Hopper


@dataclass(frozen=True, slots=True)
class Tiling:
    """Outputs per program (pairs if gated), its warps, and inputs per chunk."""

    outputs: int
    warps: int
    inputs: int


@triton.jit
def _linear(
    x,  # [rows, INPUTS]
    weight,  # [outputs, INPUTS]; GATED: gates, then ups
    bias,  # [outputs]; GATED: likewise
    norm,  # [INPUTS]
    out,  # [rows, outputs]; ADDS: accumulated into
    weight_scales,  # [outputs], if weights are float8
    rows,
    outputs,  # GATED: pairs
    eps,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,  # rows, padded
    WARPS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs of all rows. Tensors are [WARPS, N or M, inputs of a warp in a chunk], in
    tuples with one per chunk."""
    chunks: tl.constexpr = INPUTS // CHUNK
    part: tl.constexpr = CHUNK // WARPS
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.arange(0, M)
    i = tl.arange(0, WARPS)[:, None, None] * part + tl.arange(0, part)[None, None, :]
    real = n < outputs
    exists = m < rows
    place = weight + n.to(tl.int64)[None, :, None] * INPUTS + i
    up_place = weight + (n + outputs).to(tl.int64)[None, :, None] * INPUTS + i
    let_next_begin(PDL)
    weights = ()
    up_weights = ()
    scales = ()
    for chunk in tl.static_range(chunks):
        weights += (tl.load(place + chunk * CHUNK, mask=real[None, :, None], other=0.0),)
        if GATED:
            up_weights += (tl.load(up_place + chunk * CHUNK, mask=real[None, :, None], other=0.0),)
        if NORMED:
            scales += (tl.load(norm + i + chunk * CHUNK).to(tl.float32),)
    wait(PDL)
    at = out + m[None, :] * outputs + n[:, None]
    mask = real[:, None] & exists[None, :]
    if ADDS:
        before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    values = ()
    for chunk in tl.static_range(chunks):
        values += (
            tl.load(
                x + m[None, :, None] * INPUTS + i + chunk * CHUNK,
                mask=exists[None, :, None],
                other=0.0,
            ),
        )
    if NORMED:
        squares = tl.zeros([M], tl.float32)
        for chunk in tl.static_range(chunks):
            wide = values[chunk].to(tl.float32)
            squares += tl.sum(tl.sum(wide * wide, 2), 0)
        scale = tl.rsqrt(squares / INPUTS + eps)[None, :, None]
    sums = tl.zeros([WARPS, N, M], tl.float32)
    ups = tl.zeros([WARPS, N, M], tl.float32)
    for chunk in tl.static_range(chunks):
        inputs = values[chunk]
        if NORMED:
            # round as the twin does
            inputs = (inputs.to(tl.float32) * scale * scales[chunk]).to(x.dtype.element_ty)
        inputs = tl.permute(inputs, (0, 2, 1))
        sums = tl.dot(
            float8_to_16_bits(weights[chunk], inputs.dtype) if SCALED else weights[chunk],
            inputs,
            sums,
        )
        if GATED:
            ups = tl.dot(
                float8_to_16_bits(up_weights[chunk], inputs.dtype) if SCALED else up_weights[chunk],
                inputs,
                ups,
            )
    result = tl.sum(sums, 0)  # [N, M]
    if SCALED:
        result *= tl.load(weight_scales + n, mask=real, other=0.0)[:, None]
    if BIASED:
        result += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up = tl.sum(ups, 0)
        if SCALED:
            up *= tl.load(weight_scales + outputs + n, mask=real, other=0.0)[:, None]
        if BIASED:
            up += tl.load(bias + outputs + n, mask=real, other=0.0).to(tl.float32)[:, None]
        result = result / (1.0 + tl.exp(-result)) * up
    if ADDS:
        result += before
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


def tiling_for(weight: torch.Tensor, rows: int, gated: bool) -> Tiling | None:
    """Return a tiling for a layer's weight [outputs, inputs], or None if `many_rows` or torch is
    faster. Measured with `bench.products --tune` on an H200."""
    inputs = weight.shape[1]
    chunk = inputs & -inputs  # largest power of two that divides it
    if gated:
        tiling = Tiling(
            16 if inputs <= 1024 else 8, 4, min(1024 if rows <= LEAST_ROWS else 512, chunk)
        )
    elif inputs <= 1024:
        tiling = Tiling(32, 4, min(1024, chunk))
    else:
        tiling = Tiling(8 if inputs > 2048 and rows > LEAST_ROWS else 16, 4, min(1024, chunk))
    gpu = gpu_of(weight.device)
    while gpu is not None and shared_bytes(tiling, rows, inputs, gated) > gpu.shared_bytes:
        if tiling.outputs == LEAST_OUTPUTS:
            return None
        tiling = replace(tiling, outputs=tiling.outputs // 2)
    return tiling if 2 * weight.numel() <= MOST_BYTES and fits(tiling, inputs, gated) else None


def shared_bytes(tiling: Tiling, rows: int, inputs: int, gated: bool) -> int:
    """Return an upper bound of a program's shared memory: all its weights and a chunk of the input
    pass through it to the tensor cores."""
    held = tiling.outputs * inputs * (2 if gated else 1)
    return 2 * (held + padded(rows) * tiling.inputs)


def padded(rows: int) -> int:
    """Return the padded number of rows."""
    return max(LEAST_ROWS, int(triton.next_power_of_2(rows)))


def fits(tiling: Tiling, inputs: int, gated: bool) -> bool:
    """True if the layer can be computed with this tiling."""
    held = tiling.outputs * inputs * (2 if gated else 1)  # numbers
    whole = inputs % tiling.inputs == 0 and inputs // tiling.inputs <= MOST_CHUNKS
    return (
        whole and tiling.inputs >= tiling.warps * LEAST_INPUTS and held <= tiling.warps * MOST_HELD
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiling: Tiling,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [rows, inputs] by weight [outputs, inputs], contiguous, float16 or bfloat16 ->
    [rows, outputs]; accumulates in float32.

    `norm`, `gated`, `out` and `into` [rows, outputs]: see `one_row.linear`. `scales` [outputs]
    float32: multipliers of a float8 weight.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    adds = out is not None
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if into is None else into
    norm_weight, eps = norm or (weight, 0.0)
    launch(_linear, (triton.cdiv(outputs, tiling.outputs),))(
        x,
        weight,
        weight if bias is None else bias,
        norm_weight,
        out,
        norm_weight if scales is None else scales,
        rows,
        outputs,
        eps,
        INPUTS=inputs,
        CHUNK=tiling.inputs,
        N=tiling.outputs,
        M=padded(rows),
        WARPS=tiling.warps,
        NORMED=norm is not None,
        GATED=gated,
        ADDS=adds,
        BIASED=bias is not None,
        SCALED=scales is not None,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return out
