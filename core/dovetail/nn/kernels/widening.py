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
def e2m1_to_16_bits(pairs, DTYPE: tl.constexpr):
    """Return the low and the high halves of bytes, which are e2m1 numbers (0, 0.5, 1, 1.5, 2, 3, 4,
    6 and their negatives). Their bits are moved to where `DTYPE` has its own, and the difference of
    the exponents is made up by a product, as in `float8_to_16_bits`."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, e, f;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            mov.b32 e, 0x7e807e80;
            mov.b32 f, 0x80008000;
            shl.b32 c, a, 6;
            and.b32 c, c, 0x01c001c0;
            shl.b32 d, a, 12;
            lop3.b32 c, d, f, c, 0xea;
            fma.rn.bf16x2 $0, c, e, f;
            shl.b32 c, b, 6;
            and.b32 c, c, 0x01c001c0;
            shl.b32 d, b, 12;
            lop3.b32 c, d, f, c, 0xea;
            fma.rn.bf16x2 $1, c, e, f;
            shl.b32 c, a, 2;
            and.b32 c, c, 0x01c001c0;
            shl.b32 d, a, 8;
            lop3.b32 c, d, f, c, 0xea;
            fma.rn.bf16x2 $2, c, e, f;
            shl.b32 c, b, 2;
            and.b32 c, c, 0x01c001c0;
            shl.b32 d, b, 8;
            lop3.b32 c, d, f, c, 0xea;
            fma.rn.bf16x2 $3, c, e, f;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        return _e2m1_to_float16(pairs & 15), _e2m1_to_float16(pairs >> 4)


@triton.jit
def _e2m1_to_float16(codes):
    bits = ((codes & 7).to(tl.int16) << 9) | ((codes & 8).to(tl.int16) << 12)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(tl.float16)


@triton.jit
def power_of_two(codes):
    """Return 2 ** (codes - 127), e8m0 numbers, as float32; 0 is 0."""
    return (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)
