"""Launching Triton's kernels, compiling them ahead, and telling of those that can't be had.

A kernel is compiled where it is first launched, for each kind of arguments anew: some dozens of times, from a tenth of a second to three, one after
the other. What is launched by `launch` can be compiled before, many at once, in threads: Triton spends most of that time outside of Python.
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

log = logging.getLogger(__name__)

ALIGNMENT = 16  # of addresses in bytes, and of numbers: kernels read so much at once, and Triton compiles anew for what is no multiple


class KernelUnavailable(UnsupportedError):
    """A kernel can't be compiled or loaded here: nothing was launched, and its twin can compute instead."""


_unavailable: dict[int, tuple[Any, KernelUnavailable]] = {}  # by the kernel's id; the kernel is held, so that the id stays its own


class Compiler:
    """Compiles kernels in threads, each kind of launch once."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool, self._device = pool, device
        self._jobs: dict[tuple[Any, ...], Future[None]] = {}

    def add(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        """Have compiled what launching the kernel with these arguments would compile. Returns at once."""
        placed = (_kind(value, parameter.do_not_specialize) for value, parameter in zip(args, kernel.params, strict=False))
        named = ((name, _kind(value) if isinstance(value, torch.Tensor) else value) for name, value in options.items())  # constants, mostly
        kind = id(kernel), *placed, *named
        if kind not in self._jobs:
            self._jobs[kind] = self._pool.submit(self._compile, kernel, grid, tuple(map(_stand_in, args)), options)

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait until all kernels are compiled; `progress` is told how many of how many are. If one can't be compiled, its launch will say why."""
        for done, job in enumerate(self._jobs.values(), 1):
            if (error := job.exception()) is not None:
                log.debug("not compiled ahead: %s", error)
            if progress is not None:
                progress(done, len(self._jobs))

    def _compile(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a current device
        compiled = kernel.warmup(*args, grid=grid, **options)
        _ = compiled.run  # so that it is loaded, and has what launches it: a C compiler makes that


_compiler: ContextVar[Compiler | None] = ContextVar("_compiler", default=None)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, to be called with the kernel's arguments. While kernels are compiled ahead nothing is launched: what it would have written is
    undefined. The call raises `KernelUnavailable` if the kernel can't be had on this device; a warning says so the first time, and it isn't tried
    again."""
    compiler = _compiler.get()
    return partial(_launch, kernel, grid) if compiler is None else partial(compiler.add, kernel, grid)


def _launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> Any:
    if (known := _unavailable.get(id(kernel))) is not None:
        raise KernelUnavailable(*known[1].args)
    try:
        return kernel[grid](*args, **options)
    except Exception as error:
        if (why := _why_unavailable(kernel, grid, args, options)) is None:
            raise  # it was there, and the launch failed
        unavailable = KernelUnavailable(f"kernel {kernel.fn.__qualname__} of {kernel.fn.__module__} can't be had on this GPU: {why}")
        _unavailable[id(kernel)] = kernel, unavailable
        log.warning("%s; what has a twin in torch's operations goes on with it", unavailable)
        raise unavailable from error


def _why_unavailable(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
    """Why it can't be compiled or loaded for these arguments. None if it can, or is interpreted."""
    try:
        compiled = kernel.warmup(*args, grid=grid, **options)
        _ = compiled and compiled.run  # so that it is loaded
    except Exception as error:  # whatever it is: too little shared memory, no C compiler, a GPU that Triton doesn't know, …
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return None


def is_compiling_ahead() -> bool:
    """True while `launch` only has kernels compiled and launches none."""
    return _compiler.get() is not None


@contextmanager
def compiling_ahead(device: torch.device, threads: int, progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """Within the context, kernels that this thread gives to `launch` are compiled for `device` instead. Leaving it waits for that, and tells
    `progress` how many of how many are done. Numbers that kernels compute are undefined meanwhile: nothing may use one of them as an index."""
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
    """Kernels are launched after all, whatever is compiled ahead around this."""
    if (compiler := _compiler.get()) is not None:
        compiler.wait()  # for two threads must not load one kernel
    token = _compiler.set(None)
    try:
        yield
    finally:
        _compiler.reset(token)


def _kind(argument: Any, any_number: bool = False) -> object:
    """Alike for arguments that a kernel isn't compiled anew for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        width = int, argument.bit_length() // 32
        return width if any_number else (*width, argument == 1, argument % ALIGNMENT == 0)
    if isinstance(argument, float):
        return float
    if hasattr(argument, "block_shape"):  # a matrix that is described for the tensor memory accelerator
        return argument.base.dtype, tuple(argument.block_shape), str(getattr(argument, "layout", None))
    return argument


def _stand_in(argument: Any) -> Any:
    """Return a value that compiles the same as `argument` but doesn't keep its memory."""
    if isinstance(argument, torch.Tensor) and argument.data_ptr() % ALIGNMENT == 0:
        return torch.empty(0, dtype=argument.dtype, device=argument.device)
    return argument
