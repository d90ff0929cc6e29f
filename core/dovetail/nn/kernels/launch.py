"""Launching Triton kernels, compiling them ahead of time, and reporting those that are unavailable.

A kernel is compiled on its first launch, for each specialization of its arguments: some dozens of
times, 0.1 to 3 s each, one after the other. Kernels launched by `launch` can be compiled earlier
and in parallel, in threads: Triton spends most of that time outside of Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from dovetail.errors import UnsupportedError

log = logging.getLogger("dovetail")

# of addresses (bytes) and integers; Triton specializes kernels on divisibility by it
ALIGNMENT = 16


class KernelUnavailable(UnsupportedError):
    """A kernel can't be compiled or loaded here: nothing was launched, and its twin can be used
    instead."""


# by the kernel's id; holds the kernel, so that the id isn't reused
_unavailable: dict[int, tuple[Any, KernelUnavailable]] = {}


class Compiler:
    """Compiles kernels in threads, each specialization once."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._jobs: dict[tuple[Any, ...], Future[None]] = {}
        self.asked: list[tuple[Any, ...]] = []  # kinds of all launches, in order

    def add(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        """Enqueue the compilation that launching the kernel with these arguments would trigger.
        Returns at once."""
        placed = (
            _kind(value, parameter.do_not_specialize)
            for value, parameter in zip(args, kernel.params, strict=False)
        )
        # constants, mostly
        named = (
            (name, _kind(value) if isinstance(value, torch.Tensor) else value)
            for name, value in options.items()
        )
        kind = id(kernel), *placed, *named
        self.asked.append(kind)
        if kind not in self._jobs:
            self._jobs[kind] = self._pool.submit(
                self._compile, kernel, grid, tuple(map(_stand_in, args)), options
            )

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait until all kernels are compiled, calling `progress(done, total)`. If one fails to
        compile, its launch will report the reason."""
        for done, job in enumerate(self._jobs.values(), 1):
            if (error := job.exception()) is not None:
                log.debug("not compiled ahead of time: %s", error)
            if progress is not None:
                progress(done, len(self._jobs))

    def _compile(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread
        compiled = kernel.warmup(*args, grid=grid, **options)
        _ = compiled.run  # loads it and builds its launcher, with a C compiler


_compiler: ContextVar[Compiler | None] = ContextVar("_compiler", default=None)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return `kernel[grid]`, to be called with the kernel's arguments. While kernels are compiled
    ahead of time nothing is launched, and outputs are undefined. The call raises
    `KernelUnavailable` if the kernel is unavailable on this device; the first time it logs a
    warning, and it isn't tried again."""
    compiler = _compiler.get()
    return (
        partial(_launch, kernel, grid) if compiler is None else partial(compiler.add, kernel, grid)
    )


def _launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> Any:
    if (known := _unavailable.get(id(kernel))) is not None:
        raise KernelUnavailable(*known[1].args)
    try:
        return kernel[grid](*args, **options)
    except Exception as error:
        if (why := _why_unavailable(kernel, grid, args, options)) is None:
            raise  # it is available; the launch itself failed
        unavailable = KernelUnavailable(
            f"kernel {kernel.fn.__qualname__} of {kernel.fn.__module__} is unavailable on this "
            f"GPU: {why}"
        )
        _unavailable[id(kernel)] = kernel, unavailable
        log.warning("%s; functions with a twin in plain torch fall back to it", unavailable)
        raise unavailable from error


def _why_unavailable(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> str | None:
    """Return why it can't be compiled or loaded for these arguments; None if it can, or is
    interpreted."""
    try:
        compiled = kernel.warmup(*args, grid=grid, **options)
        _ = compiled and compiled.run  # loads it
    except (
        Exception
    ) as error:  # too little shared memory, no C compiler, a GPU that Triton doesn't support, …
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return None


def is_compiling_ahead() -> bool:
    """True while `launch` only compiles kernels and launches none."""
    return _compiler.get() is not None


def asked_kinds() -> list[tuple[Any, ...]] | None:
    """Return the kinds of kernels that this thread has passed to `launch` since it only compiles
    them, a list that grows; None if it launches them."""
    compiler = _compiler.get()
    return None if compiler is None else compiler.asked


@contextmanager
def compiling_ahead(
    device: torch.device, threads: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[None]:
    """Context in which kernels that this thread passes to `launch` are compiled for `device`
    instead of launched. Leaving it waits for the compilation, calling `progress(done, total)`.
    Kernel outputs are undefined in it: they must not be used as indices."""
    with ThreadPoolExecutor(threads, thread_name_prefix="dovetail-compile") as pool:
        compiler = Compiler(pool, device)
        token = _compiler.set(compiler)
        try:
            yield
        finally:
            _compiler.reset(token)
            compiler.wait(progress)


@contextmanager
def launching() -> Iterator[None]:
    """Context that launches kernels, even within `compiling_ahead`."""
    if (compiler := _compiler.get()) is not None:
        compiler.wait()  # two threads must not load the same kernel
    token = _compiler.set(None)
    try:
        yield
    finally:
        _compiler.reset(token)


def _kind(argument: Any, any_number: bool = False) -> object:
    """Return the specialization key: equal for arguments that share a compiled kernel."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        width = int, argument.bit_length() // 32
        return width if any_number else (*width, argument == 1, argument % ALIGNMENT == 0)
    if isinstance(argument, float):
        return float
    if hasattr(argument, "block_shape"):  # a descriptor for the tensor memory accelerator
        return (
            argument.base.dtype,
            tuple(argument.block_shape),
            str(getattr(argument, "layout", None)),
        )
    return argument


def _stand_in(argument: Any) -> Any:
    """Return a value with the same specialization as `argument` that doesn't keep its memory
    alive."""
    if isinstance(argument, torch.Tensor) and argument.data_ptr() % ALIGNMENT == 0:
        return torch.empty(0, dtype=argument.dtype, device=argument.device)
    return argument
