"""Helpers for kernels in which one program reads a whole row."""

from __future__ import annotations

NUMBERS_PER_WARP = 256  # 16 bytes of bfloat16 per thread
MAX_WARPS = 16


def warps_of_row(numbers: int) -> int:
    """Return the number of warps, a power of two, for a row of `numbers`."""
    return min(MAX_WARPS, max(1, numbers // NUMBERS_PER_WARP))
