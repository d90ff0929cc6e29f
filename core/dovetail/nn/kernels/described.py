"""Tile descriptors for Hopper's tensor memory accelerator, with the shared-memory layout of its
matrix units."""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def in_tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a contiguous matrix of float16, bfloat16 or FP8 (e4m3), to be loaded in tiles [rows,
    columns]."""
    return TensorDescriptor.from_tensor(
        matrix, [rows, columns], _layout(rows, columns, matrix.dtype.itemsize)
    )


@cache
def _layout(rows: int, columns: int, itemsize: int) -> gl.NVMMASharedLayout:
    # same layout for float16
    return gl.NVMMASharedLayout.get_default_for(
        [rows, columns], gl.bfloat16 if itemsize == 2 else gl.float8e4nv
    )
