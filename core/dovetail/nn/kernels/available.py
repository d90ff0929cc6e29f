"""Which tensors a Triton kernel computes; all others go to the kernel's twin in plain torch."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

log = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Whether it is installed; doesn't import it."""
    return find_spec("triton") is not None


def use_kernels(*tensors: torch.Tensor) -> bool:
    """Whether a kernel may be given these: contiguous, on a CUDA device, and Triton is there."""
    return has_triton() and all(x.is_cuda and x.is_contiguous() for x in tensors)


@cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether kernels may compute with all four warps of a group at once: a Hopper, and a Triton in which that can be said."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        from dovetail.nn.kernels import many_rows
    except ImportError as error:  # it is Triton's youngest part
        log.warning("without the kernels for some dozens of rows, since this Triton hasn't what they are written in: %s", error)
        return False
    return many_rows.computes_right(device)
