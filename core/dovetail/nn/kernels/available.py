"""Which tensors a Triton kernel computes; all others go to the kernel's twin in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from dovetail.nn.kernels.launch import launching

log = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Whether it is installed; doesn't import it."""
    return find_spec("triton") is not None


def use_kernels(*tensors: torch.Tensor) -> bool:
    """Whether a kernel may be given these: contiguous, on a CUDA device, and Triton is there."""
    return has_triton() and all(x.is_cuda and x.is_contiguous() for x in tensors)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def has_many_rows(device: torch.device) -> bool:
    """Whether the kernels of `many_rows` can be used."""

    def check() -> None:
        from dovetail.nn.kernels import many_rows

        many_rows.check(device)

    return is_hopper(device) and works("layers of some dozens of rows", check)


def works(kernel: str, check: Callable[[], object]) -> bool:
    """Whether a kernel in Gluon, Triton's youngest part, imports, compiles and computes what it should with this Triton: `check`, which may launch
    it, raises if not, and a warning says why it will be done without."""
    try:
        with launching():
            check()
    except Exception as error:  # whatever it is, there is another way
        log.warning("without the kernel for %s, which fails with this Triton: %s", kernel, error)
        return False
    return True
