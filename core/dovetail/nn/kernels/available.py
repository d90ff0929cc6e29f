"""Choice between a Triton kernel and its twin in plain torch, which handles all tensors that the
kernel can't.

A function that has both follows this pattern; if a kernel is unavailable on this GPU
(`KernelUnavailable`), the twin runs:
    if use_kernels(x):
        with suppress(KernelUnavailable):
            return kernels.f(x)
    return the same in torch
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec

import torch

from dovetail.api.start_phases import phase
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.nn.kernels.launch import launching

log = logging.getLogger("dovetail")

Checked = Callable[[torch.device], bool]
_running: dict[tuple[Checked, torch.device], Future[bool]] = {}
_lock = threading.Lock()


def shared(check: Checked) -> Checked:
    """Let a call while the same one is running in another thread wait for its result."""

    @wraps(check)
    def answer(device: torch.device) -> bool:
        mine = Future[bool]()
        with _lock:
            running = _running.setdefault((check, device), mine)
        if running is not mine:
            return running.result()
        try:
            mine.set_result(check(device))
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with _lock:
                del _running[check, device]
        return mine.result()

    return answer


@cache
def has_triton() -> bool:
    """True if Triton is installed, without importing it."""
    return find_spec("triton") is not None


def use_kernels(*tensors: torch.Tensor) -> bool:
    """True if kernels accept these tensors: contiguous, on a CUDA device that runs Triton
    kernels."""
    return (
        has_triton()
        and all(x.is_cuda and x.is_contiguous() for x in tensors)
        and runs_kernels(tensors[0].device)
    )


@cache
@shared
def runs_kernels(device: torch.device) -> bool:
    """True if Triton kernels run on the device: requires Triton, a GPU that it supports, and a C
    compiler."""

    def check() -> None:
        from dovetail.nn.kernels import embedding

        embedding.check(device)

    return device.type == "cuda" and has_triton() and works("everything but torch's own", check)


def is_hopper(device: torch.device) -> bool:
    gpu = gpu_of(device)
    return gpu is not None and gpu.is_hopper


def _works_on_hopper(device: torch.device, kernel: str, module: str) -> bool:
    """True if the device is a Hopper on which `check` of `dovetail.nn.kernels.{module}` passes.
    `kernel`: its name in the warning, see `works`."""
    return (
        is_hopper(device)
        and runs_kernels(device)
        and works(kernel, lambda: import_module(f"dovetail.nn.kernels.{module}").check(device))
    )


@cache
@shared
def has_many_rows(device: torch.device) -> bool:
    """True if the kernels of `many_rows` are available."""
    return _works_on_hopper(device, "layers of some dozens of rows", "many_rows")


@cache
@shared
def has_one_row_float8(device: torch.device) -> bool:
    """True if the kernel `one_row_float8` is available. Measured only on Hopper."""
    return _works_on_hopper(device, "layers of one row of float8 weights", "one_row_float8")


@cache
@shared
def has_few_experts_float8(device: torch.device) -> bool:
    """True if the kernel `few_experts_float8` is available. Measured only on Hopper."""
    return _works_on_hopper(device, "few tokens' experts of float8 weights", "few_experts_float8")


@cache
@shared
def has_few_experts_fp4(device: torch.device) -> bool:
    """True if the kernel `few_experts_fp4` is available. Measured only on Hopper."""
    return _works_on_hopper(device, "few tokens' experts of FP4 weights", "few_experts_fp4")


@cache
@shared
def has_split_experts(device: torch.device) -> bool:
    """True if `experts_float8.split_layer` is available."""
    return _works_on_hopper(device, "experts of inputs split in two numbers", "experts_float8")


@cache
@shared
def has_float8_products(device: torch.device) -> bool:
    """True if products of float8 by float8 are available, see `float8_products`."""
    return _works_on_hopper(device, "products of float8 numbers", "float8_products")


@cache
@shared
def has_products_of_blocks(device: torch.device) -> bool:
    """True if `float8_products.linear_of_blocks` is available."""

    def check() -> None:
        from dovetail.nn.kernels import float8_products

        float8_products.check_blocks(device)

    return has_float8_products(device) and works("products of float8 numbers in blocks", check)


@dataclass(frozen=True, slots=True)
class BegunChecks:
    """Checks that run in threads."""

    threads: tuple[threading.Thread, ...]

    def wait(self) -> None:
        """Wait for all of them: their launches would disturb the recording of a CUDA graph."""
        for thread in self.threads:
            thread.join()


# asked for by models in bfloat16; by those with float8 weights, too
OF_BFLOAT16: tuple[Checked, ...] = (has_many_rows,)
OF_FLOAT8: tuple[Checked, ...] = (
    has_one_row_float8,
    has_products_of_blocks,
    has_few_experts_float8,
    has_split_experts,
)


def begin_checks(device: torch.device, checks: Sequence[Checked]) -> BegunChecks:
    """Let threads check kernels that a model on `device` will ask for, so that they are compiled at
    once and while other things are done."""
    if not is_hopper(device) or not has_triton():
        return BegunChecks(())

    def run(check: Checked) -> None:
        torch.cuda.set_device(device)  # the current device is per thread
        check(device)

    threads = tuple(
        threading.Thread(target=run, args=(check,), name="dovetail-check") for check in checks
    )
    for thread in threads:
        thread.start()
    return BegunChecks(threads)


def works(kernel: str, check: Callable[[], object]) -> bool:
    """True if a kernel imports, compiles and computes correct values with this Triton on this GPU.
    `check` may launch it and raises if not; then a warning gives the reason. Used for kernels
    written in Gluon, Triton's youngest part, and on untested GPUs."""
    try:
        with phase("checking kernels"), launching():
            check()
    except Exception as error:  # any error: the twin remains
        log.warning(
            "the kernel for %s is disabled, since it fails with this version of Triton: %s",
            kernel,
            error,
        )
        return False
    return True
