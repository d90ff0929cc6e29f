"""Which tensors a Triton kernel computes; all others go to the kernel's twin in plain torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def has_triton() -> bool:
    """Whether it is installed; doesn't import it."""
    return find_spec("triton") is not None


def use_kernels(*tensors: torch.Tensor) -> bool:
    """Whether a kernel may be given these: contiguous, on a CUDA device, and Triton is there."""
    return has_triton() and all(x.is_cuda and x.is_contiguous() for x in tensors)
