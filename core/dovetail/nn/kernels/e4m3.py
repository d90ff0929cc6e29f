# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""FP8 (e4m3: 1 sign bit, 4 exponent bits, 3 mantissa bits, no infinity) encoded by integer
arithmetic in kernels: the same result on every GPU and in Triton's interpreter, whose own
conversion rounds differently. Twin: `tensor.clamp(-448, 448).to(torch.float8_e4m3fn)`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
LEAST_NORMAL = tl.constexpr(2.0**-6)
# float32 from here to 2**15 are 2**-9 apart, as e4m3 are below 2**-6: adding it rounds, ties to
# even
EVEN = tl.constexpr(2.0**14)


@triton.jit
def e4m3_codes(x):
    """Return the e4m3 codes (uint8) of float32 `x`: round to nearest, ties to even; saturate at
    448; NaN stays NaN (0x7f)."""
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # the mantissa's last 20 bits rounded away; the exponent counts from -7
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + EVEN).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < LEAST_NORMAL, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scaled_codes(x, scale):
    """Return the codes of float32 `x` / `scale`."""
    return e4m3_codes(tl.div_rn(x, scale))
