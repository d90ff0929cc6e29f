# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Conversion of FP4 weights to float8, used before products of many tokens, where its cost is small
and products of float8 are twice as fast as those of 16 bits. Twin: `Mxfp4Format.dequantized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.stored_experts import CHUNK, FLOAT8, RAISED, Stored
from dovetail.nn.kernels.widening import e2m1_to_float16, power_of_two

OUTPUTS = 32  # of a program
# powers of two by which weights of the largest scale are multiplied: 6 becomes 384, and e4m3 ends
# at 448
LARGEST = 6


@triton.jit
def _largest(codes):
    """The largest byte of each number."""
    low = tl.maximum(codes & 255, (codes >> 8) & 255)
    return tl.maximum(low, tl.maximum((codes >> 16) & 255, (codes >> 24) & 255))


@triton.jit
def _convert(
    values,  # [experts, outputs, 32 * CHUNKS] int16
    scales,  # [experts, CHUNKS, outputs] int32
    out,  # [experts, outputs, INPUTS]
    out_scales,  # [experts, outputs]
    outputs,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
    LARGEST: tl.constexpr,
    RAISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convert N outputs of an expert."""
    let_next_begin(PDL)
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    real = n < outputs
    of_expert = scales + expert * CHUNKS * outputs + n
    c = tl.arange(0, PADDED)
    wait(PDL)
    all_codes = tl.load(
        of_expert[:, None] + c[None, :] * outputs,
        mask=real[:, None] & (c < CHUNKS)[None, :],
        other=0,
    )
    largest = tl.max(_largest(all_codes), 1)
    tl.store(
        out_scales + expert * outputs + n,
        power_of_two(tl.maximum(largest - (RAISED + LARGEST), 1)),
        mask=real,
    )
    e = tl.arange(0, 32)
    row = expert * outputs + n
    for chunk in range(CHUNKS):
        place = values + row[:, None] * (CHUNKS * 32) + (chunk * 32 + e)[None, :]
        fours = e2m1_to_float16(tl.load(place, mask=real[:, None], other=0))
        codes = tl.load(of_expert + chunk * outputs, mask=real, other=0)
        for quarter in tl.static_range(4):
            code = (codes >> (8 * quarter)) & 255
            factor = power_of_two(tl.maximum(code - largest + (127 + LARGEST), 0))
            weights = fours[quarter].to(tl.float32) * factor[:, None]
            i = chunk * 128 + quarter * 32 + e
            tl.store(
                out + row[:, None] * INPUTS + i[None, :],
                weights.to(out.dtype.element_ty),
                mask=real[:, None] & (i < INPUTS)[None, :],
            )


def as_float8(layer: Stored) -> Stored:
    """Return FP4 weights as e4m3 with a scale per output, that of the largest weights: exact but
    for weights that are 2 ** -14 of the output's largest or less."""
    count, outputs = layer.values.shape[:2]
    device = layer.values.device
    values = torch.empty((count, outputs, layer.inputs), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((count, outputs), dtype=torch.float32, device=device)
    chunks = triton.cdiv(layer.inputs, CHUNK)
    launch(_convert, (triton.cdiv(outputs, OUTPUTS), count))(
        layer.values,
        layer.scales,
        values,
        scales,
        outputs,
        INPUTS=layer.inputs,
        CHUNKS=chunks,
        PADDED=triton.next_power_of_2(chunks),
        N=OUTPUTS,
        LARGEST=LARGEST,
        RAISED=RAISED,
        num_warps=4,
        **pdl_options(device),
    )
    return Stored(values, layer.inputs, scales, kind=FLOAT8, narrows=True)
