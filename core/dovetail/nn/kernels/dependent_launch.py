# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Programmatic dependent launch: a kernel is set up on the GPU while the previous one still runs,
which hides the cost of the launch.

Such a kernel may read data that no kernel writes, such as weights, at once; it may read anything
else, and write, only after `wait`. A kernel that calls `wait` must be launched with the arguments
of `pdl_options`. Supported from Hopper on; on other GPUs and in Triton's interpreter, `wait` is a
no-op.
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
    """Allow the next kernel to be set up from now on."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch(pointers):
    """Prefetch the memory lines at these addresses into L2, without waiting. Only with PDL."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Return the launch arguments for programmatic dependent launch (PDL) on `device`."""
    gpu = gpu_of(device)
    return {"PDL": True, "launch_pdl": True} if gpu is not None and gpu.has_pdl else {"PDL": False}
