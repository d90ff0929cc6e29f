"""Compiling kernels for a GPU that isn't there: launches compile for a Hopper, and then do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver, jit

from dovetail.nn.kernels import chain

TARGET = GPUTarget("cuda", 90, 32)
SHARED_MEMORY_BYTES = 227 << 10  # that one program may have


@dataclass(frozen=True)
class Compiled:
    """What a launch got: code for the device, and the shared memory that it takes."""

    name: str
    ptx: str
    shared_bytes: int


class NoDevice:
    """A driver without a device."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class NoKernel:
    """What is launched."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None: ...

    def run(self, *arguments: Any) -> None: ...


@contextmanager
def compiling_for_hopper() -> Iterator[list[Compiled]]:
    """Every kernel that is launched meanwhile, once for each way that it is specialised. Tensors lie on the CPU; nothing is computed."""
    kernels: list[Compiled] = []
    launched: list[Any] = []

    def do_compile(function: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool) -> NoKernel:
        source = GluonASTSource if function.is_gluon() else ASTSource
        compiled = compile(source(function, signature, constexprs, attrs), target=TARGET, options=options.__dict__)
        kernels.append(Compiled(function.fn.__name__, compiled.asm["ptx"], compiled.metadata.shared))
        launched.append(function)
        function.device_caches[device][0][key] = NoKernel()
        return function.device_caches[device][0][key]  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.JITFunction, "_do_compile", do_compile)
        patch.setattr(chain, "_can_chain", lambda device: True)
        patch.setattr(driver, "_active", NoDevice())
        yield kernels
        for function in launched:
            function.device_caches.clear()
