"""Compiles kernels for an absent GPU: launches compile down to its machine code, and then do
nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver, jit

from dovetail.nn.kernels import available, gpu
from dovetail.nn.kernels.gpu import GPU
from dovetail_attention import triton_backend

GPUS = {
    75: GPU("T4", (7, 5), shared_bytes=64 << 10, processor_shared_bytes=64 << 10, processors=40),
    80: GPU(
        "A100", (8, 0), shared_bytes=163 << 10, processor_shared_bytes=164 << 10, processors=108
    ),
    86: GPU(
        "RTX 3090", (8, 6), shared_bytes=99 << 10, processor_shared_bytes=100 << 10, processors=82
    ),
    89: GPU(
        "RTX 4090", (8, 9), shared_bytes=99 << 10, processor_shared_bytes=100 << 10, processors=128
    ),
    90: GPU(
        "H200", (9, 0), shared_bytes=227 << 10, processor_shared_bytes=228 << 10, processors=132
    ),
    100: GPU(
        "B200", (10, 0), shared_bytes=227 << 10, processor_shared_bytes=228 << 10, processors=148
    ),
    120: GPU(
        "RTX 5090", (12, 0), shared_bytes=99 << 10, processor_shared_bytes=100 << 10, processors=170
    ),
}  # by what Triton and ptxas call the architecture, 10 * major + minor; one GPU that has it


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a launch: device code, and its resources."""

    module: str
    name: str
    ptx: str
    cubin: bytes
    shared_bytes: int  # of a program
    registers: int  # of a thread
    spilled_bytes: int  # of a thread: what registers had no room for, and lies in memory
    warps: int

    @property
    def full_name(self) -> str:
        """With the last two parts of its module's, "kernels.gate._silu_mul"."""
        return ".".join((*self.module.split(".")[-2:], self.name))


class NoDevice:
    """A driver without a device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class NoKernel:
    """Replaces the launch of a compiled kernel with a no-op."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None: ...

    def run(self, *arguments: Any) -> None: ...


@contextmanager
def compiling_for(arch: int, only: str | None = None) -> Iterator[list[Compiled]]:
    """Every kernel that is launched meanwhile, once for each way that it is specialised. Tensors
    lie on the CPU; nothing is computed, and what kernels would have written is undefined. `gpu_of`
    tells of that GPU, for the CPU too. With `only`, kernels of other names aren't compiled."""
    target, kernels, launched = GPUTarget("cuda", arch, 32), list[Compiled](), list[Any]()

    def do_compile(
        function: Any,
        key: Any,
        signature: Any,
        device: Any,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> NoKernel:
        launched.append(function)
        function.device_caches[device][0][key] = NoKernel()
        if only not in (None, function.fn.__name__):
            return function.device_caches[device][0][key]  # type: ignore[no-any-return]
        source = GluonASTSource if function.is_gluon() else ASTSource
        compiled = compile(
            source(function, signature, constexprs, attrs), target=target, options=options.__dict__
        )
        registers, spilled = _resources(compiled.asm["cubin"])
        source_of, taken, (ptx, cubin) = (
            function.fn,
            compiled.metadata,
            (compiled.asm[kind] for kind in ("ptx", "cubin")),
        )
        kernels.append(
            Compiled(
                source_of.__module__,
                source_of.__name__,
                ptx,
                cubin,
                taken.shared,
                registers,
                spilled,
                taken.num_warps,
            )
        )
        return function.device_caches[device][0][key]  # type: ignore[no-any-return]

    with ExitStack() as patches:
        for module in [
            module
            for name, module in sys.modules.items()
            if name.startswith("dovetail") and module is not available
        ]:
            for name, answer in (
                ("use_kernels", True),
                ("has_many_rows", GPUS[arch].is_hopper),
                ("has_one_row_float8", GPUS[arch].is_hopper),
                ("has_split_experts", GPUS[arch].is_hopper),
            ):
                if name in vars(module):
                    patches.enter_context(
                        patch.object(module, name, lambda *asked, answer=answer: answer)
                    )
        # nothing is computed to look at
        patches.enter_context(
            patch.object(triton_backend, "_loads_apart_well", lambda likeness, limits: True)
        )
        patches.enter_context(patch.object(jit.JITFunction, "_do_compile", do_compile))
        patches.enter_context(patch.object(gpu, "_gpu_of", lambda device: GPUS[arch]))
        patches.enter_context(patch.object(driver, "_active", NoDevice(target)))
        yield kernels
        for function in launched:
            function.device_caches.clear()


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return a kernel's registers, and spilled bytes, per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack, local = (
        int(re.search(rf"\b{name}:(\d+)", told)[1]) for name in ("REG", "STACK", "LOCAL")
    )  # type: ignore[index]
    return registers, stack + local
