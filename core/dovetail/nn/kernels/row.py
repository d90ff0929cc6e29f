"""Helpers of kernels in which one program reads a whole row at once."""

from __future__ import annotations

NUMBERS_PER_WARP = 256  # 16 bytes of bfloat16 a thread
MAX_WARPS = 16


def warps_of_row(numbers: int) -> int:
    """Return the number of warps for so many numbers, padded to a power of two."""
    return min(MAX_WARPS, max(1, numbers // NUMBERS_PER_WARP))
