# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Programmatic dependent launch: a kernel is brought onto the GPU while the one before it still runs, so that a launch costs nothing.

Such a kernel may read what nobody writes, its weights say, at once; all else, and whatever it writes, only after `wait`. A kernel that calls `wait`
must be launched with the arguments of `pdl_options`. GPUs from Hopper on have this; elsewhere, and in Triton's interpreter, `wait` does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.nn.kernels.gpu import gpu_of


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Allow the next kernel to be brought onto the GPU from now on."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch(pointers):
    """Ask for the lines of memory that these lie in, and don't wait. Only in a launch with PDL."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Return the arguments that a launch on `device` takes for programmatic dependent launch (PDL)."""
    gpu = gpu_of(device)
    return {"PDL": True, "launch_pdl": True} if gpu is not None and gpu.has_pdl else {"PDL": False}
