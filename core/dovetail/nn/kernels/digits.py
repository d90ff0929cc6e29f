# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Float32 values as integers of three bytes, and dot products of bytes: a GPU accumulates four byte
products in one instruction (dp4a). Triton's interpreter computes the same with plain integer
operations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
BITS = tl.constexpr(21)  # of an integer, below the highest bit of the largest one
# float32 near it are 1 apart: adding it rounds to an integer, in the lowest bits
ONE_AND_A_HALF = tl.constexpr(1.5 * 2.0**23)
ITS_BITS = tl.constexpr(0x4B400000)
INFINITE = tl.constexpr(254 << 23)  # 2**127; larger sums overflow
LEAST = tl.constexpr(22 << 23)  # 2**-105; below it, the scale would be subnormal


@triton.jit
def scale_of(largest_bits):
    """Return powers of two (factor, scale) for numbers whose largest magnitude has bits
    `largest_bits`: numbers times the factor are below 2**22, and integers times the scale are the
    numbers again. The scale is NaN if the largest is infinite, NaN or at least 2**127."""
    power = tl.maximum(largest_bits & 0x7F800000, LEAST)
    factor = (-power + INFINITE).to(tl.float32, bitcast=True) * 2.0**BITS
    scale = (power - (BITS << 23)).to(tl.float32, bitcast=True)
    return factor, tl.where(power < INFINITE, scale, float("nan"))


@triton.jit
def raised(numbers, factor):
    """Return numbers times their factor, rounded to integers, plus `ITS_BITS`."""
    return (numbers * factor + ONE_AND_A_HALF).to(tl.int32, bitcast=True)


@triton.jit
def digits(a, b, c, d):
    """Return the low bytes of four results of `raised` as a word (that of `a` lowest), their middle
    bytes, and their high bytes, signed."""
    if INTERPRETED:
        low = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24
        middle = (a >> 8 & 255) | (b >> 8 & 255) << 8 | (c >> 8 & 255) << 16 | (d >> 8 & 255) << 24
        high = (
            (a >> 16 & 255) | (b >> 16 & 255) << 8 | (c >> 16 & 255) << 16 | (d >> 16 & 255) << 24
        )
    else:
        low, middle, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 ab, cd;
            prmt.b32 ab, $3, $4, 0x5140;
            prmt.b32 cd, $5, $6, 0x5140;
            prmt.b32 $0, ab, cd, 0x5410;
            prmt.b32 $1, ab, cd, 0x7632;
            prmt.b32 ab, $3, $4, 0x0062;
            prmt.b32 cd, $5, $6, 0x0062;
            prmt.b32 $2, ab, cd, 0x5410;
            }""",
            "=&r,=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    # minus the 64 of `ITS_BITS`: no byte carries
    return (
        low,
        middle,
        (high + 0x40404040) ^ -0x7F7F7F80,
    )


@triton.jit
def add_products_of_bytes(sums, unsigned, others, SIGNED: tl.constexpr):
    """Return sums plus the dot products of the four bytes of each word; those of `others` may be
    SIGNED."""
    if INTERPRETED:
        for at in tl.static_range(4):
            other = others << 24 - 8 * at >> 24
            sums += (unsigned >> 8 * at & 255) * (other if SIGNED else other & 255)
        return sums
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [unsigned, others, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [unsigned, others, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
