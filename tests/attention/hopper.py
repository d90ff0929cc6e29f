"""Compiling kernels for a Hopper that isn't there: the GPU that they were measured on."""

from __future__ import annotations

from contextlib import AbstractContextManager

from bench.compiling import GPUS, Compiled, compiling_for

SHARED_MEMORY_BYTES = GPUS[90].shared_bytes  # that one program may have


def compiling_for_hopper() -> AbstractContextManager[list[Compiled]]:
    """As `compiling_for` the architecture of an H200."""
    return compiling_for(90)
