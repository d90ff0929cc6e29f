# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels that do nothing but convert, so that the conversions of other kernels can be looked at:
imported where kernels run, as Triton decides then whether they are interpreted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.e4m3 import scaled_codes
from dovetail_attention.triton_tile import apart

AT_ONCE = tl.constexpr(256)


@triton.jit
def _encode(x, codes, scale, count):
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    tl.store(codes + i, scaled_codes(tl.load(x + i, mask=i < count), scale), mask=i < count)


@triton.jit
def _widen_pairs(pairs, out, count):
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    first, second = apart(tl.load(pairs + i, mask=i < count, other=0), out.dtype.element_ty)
    tl.store(out + 2 * i, first, mask=i < count)
    tl.store(out + 2 * i + 1, second, mask=i < count)


def encode(x: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 `x` [n] over `scale` as float8_e4m3fn [n]."""
    codes = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    _encode[(triton.cdiv(len(x), AT_ONCE.value),)](x, codes, scale, len(x))
    return codes.view(torch.float8_e4m3fn)


def widen_pairs(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of e4m3, uint8 [2 n], as numbers of `dtype`, read two by two."""
    out = torch.empty(len(codes), dtype=dtype, device=codes.device)
    _widen_pairs[(triton.cdiv(len(codes), 2 * AT_ONCE.value),)](
        codes.view(torch.int16), out, len(codes) // 2
    )
    return out
