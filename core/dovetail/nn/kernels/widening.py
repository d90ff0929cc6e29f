# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, SIM300 (constants are upper case, and arguments)
"""Conversion of 8-bit and 4-bit numbers to 16 bits within kernels, without rounding. Twins:
`tensor.to(dtype)`, except for NaN, which is rejected when weights are loaded; and the integers
themselves.

A GPU's own conversion to bfloat16 takes longer than loading the numbers from memory, and so does
Triton's code for the same shifts and masks. So bytes are spread over the upper or lower halves of
16-bit lanes and masked, two lanes at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.nn.kernels.stored_experts import RAISED

# `scaled_e2m1` are that many powers of two too small, so that neither factors nor products exceed
# the exponents of bfloat16; sums in float32 make up for it
LOWERED: tl.constexpr = tl.constexpr(126 - RAISED)


@triton.jit
def float8_to_16_bits(narrow, DTYPE: tl.constexpr):
    """Convert e4m3 to bfloat16 or float16. For bfloat16, sign, exponent and mantissa are shifted
    into place, and the difference of the exponent biases, 127 - 7, is made up by multiplying by
    2**120."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            cvt.u32.u16 a, $1;
            prmt.b32 a, a, 0, 0x1404;
            shr.u32 b, a, 4;
            and.b32 b, b, 0x07f007f0;
            lop3.b32 a, a, 0x80008000, b, 0xea;
            mov.b32 b, 0x7b807b80;
            mov.b32 c, 0x80008000;
            fma.rn.bf16x2 $0, a, b, c;
            }""",
            "=r,h",
            [narrow.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return narrow.to(DTYPE)


@triton.jit
def pairs_to_16_bits(pairs, DTYPE: tl.constexpr):
    """Return the low and the high halves of bytes, 0 to 15, as the lowest mantissa bits of 128
    (bfloat16) or 1024 (float16)."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            mov.b32 $0, 0x43004300;
            lop3.b32 $1, b, 0x000f000f, $0, 0xea;
            lop3.b32 $2, c, 0x000f000f, $0, 0xea;
            lop3.b32 $3, d, 0x000f000f, $0, 0xea;
            lop3.b32 $0, a, 0x000f000f, $0, 0xea;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        return shifted(pairs & 15, DTYPE), shifted(pairs >> 4, DTYPE)


@triton.jit
def shifted(small, DTYPE: tl.constexpr):
    """Return integers below 128 in the form that `pairs_to_16_bits` returns."""
    if DTYPE == tl.bfloat16:
        return (small.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return (small.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def e2m1_to_float16(fours):
    """Return the four e2m1 numbers (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) of int16, laid
    out as by `dovetail.nn.format.mxfp4`."""
    bits = fours.to(tl.int32)
    return (
        _normal(((bits & 0x1C0) << 3) | (bits & 0x8000)),
        _normal(((bits & 0x38) << 6) | ((bits & 0x1000) << 3)),
        _normal(((bits & 7) << 9) | ((bits & 0x200) << 6)),
        _normal(((bits & 0xC00) >> 1) | ((bits & 0x2000) >> 2) | ((bits & 0x4000) << 1)),
    )


@triton.jit
def _normal(bits):
    return (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(tl.float16)


# four times two numbers: the bits of three are where bfloat16 has its own after a shift
SCALED_E2M1 = tl.constexpr(
    """{
    .reg .b32 m, n, f;
    mov.b32 f, 0x80008000;
    and.b32 m, $4, 0x81c081c0;
    fma.rn.bf16x2 $0, m, $5, f;
    shl.b32 m, $4, 3;
    and.b32 m, m, 0x81c081c0;
    fma.rn.bf16x2 $1, m, $7, f;
    shl.b32 m, $4, 6;
    and.b32 m, m, 0x81c081c0;
    fma.rn.bf16x2 $2, m, $9, f;
    shr.u32 m, $4, 4;
    and.b32 m, m, 0x00c000c0;
    shr.u32 n, $4, 5;
    lop3.b32 m, n, 0x01000100, m, 0xea;
    shl.b32 n, $4, 1;
    lop3.b32 m, n, f, m, 0xea;
    fma.rn.bf16x2 $3, m, $11, f;
    }"""
)
SCALED_E2M1_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@triton.jit
def scaled_e2m1(fours, a, b, c, d):
    """`e2m1_to_float16` in bfloat16, times the factors int32 that `factors_of_e2m1` made of each
    number's scale; two adjacent ones are the same. One product makes up for the difference of the
    exponents, and scales."""
    return tl.inline_asm_elementwise(
        SCALED_E2M1,
        SCALED_E2M1_REGISTERS,
        [fours, a, b, c, d],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def factors_of_e2m1(codes):
    """Return the factors of `scaled_e2m1` for the e8m0 codes, raised by RAISED, in the lowest bytes
    of int32: two bfloat16 in an int32. Products are 2 ** LOWERED too small: the bits of e2m1 are
    bfloat16s of 2 ** -126 of its values."""
    return (codes & 255) * 0x00800080


@triton.jit
def power_of_two(codes):
    """Return 2 ** (codes - 127), e8m0 numbers, as float32; 0 is 0."""
    return (codes << 23).to(tl.float32, bitcast=True)
