"""Counts the instructions per weight of the kernels for one row, as compiled by ptxas, without a
GPU.

    python -m bench.instructions                          # the products of Qwen3-8B's layers, for an H200
    python -m bench.instructions --shape qwen3-0.6b --arch 89 --outputs 4 8 16

These kernels have no loops: each instruction is issued once by each warp, so the count is that of
the machine code. It includes what is done for the inputs and around the layer. A processor issues
four warps' instructions a cycle. For a layer it is told how long that takes at best, and how long
memory takes for its weights at 4.8 TB/s, both on an H200. What a kernel takes in truth only a GPU
tells: `python -m bench.formats --only one-row`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs

from bench.compiling import GPUS, Compiled, compiling_for
from bench.shapes import SHAPES
from dovetail.nn.kernels import one_row, one_row_float8, one_row_int4, streamed
from dovetail.nn.kernels.launch import launch

DTYPE = torch.bfloat16
# of an H200
PROCESSORS = 132
CYCLES_PER_S = 1.98e9
BYTES_PER_S = 4.8e12
SCHEDULERS = 4  # of a processor
FORMATS = ("bf16", "fp8 one_row", "fp8", "int4 g128", "int4 g128 z", "int4 g32 z")
# those that tell the kernels apart
KINDS = (
    "IDP",
    "FFMA",
    "LOP3",
    "SHF",
    "PRMT",
    "HADD2",
    "F2FP",
    "HMMA",
    "LDG",
)


def instructions(cubin: bytes) -> Counter[str]:
    """Return the number of instructions of each kind in a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    kinds = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\S+\s+)?([A-Z][A-Z0-9]*)", text, re.MULTILINE
    )
    return Counter(kind for kind in kinds if kind != "NOP")


def launch_product(
    form: str,
    outputs: int,
    inputs: int,
    *,
    normed: bool,
    gated: bool,
    adds: bool,
    at_once: int | None,
) -> None:
    """Launch one product of a layer with empty weights and inputs."""
    x = torch.empty(1, inputs, dtype=DTYPE)
    out = torch.empty(1, outputs, dtype=DTYPE) if adds else None
    norm = (torch.empty(inputs, dtype=DTYPE), 1e-6) if normed else None
    if form.startswith("int4"):
        group = int(form.split()[1][1:])
        zeros = (
            torch.empty(inputs // group, outputs, dtype=torch.uint8) if form.endswith("z") else None
        )
        scales = torch.empty(inputs // group, outputs, dtype=torch.float16)
        weight = streamed.Stored(
            torch.empty(outputs, inputs // 2, dtype=torch.uint8), scales, zeros, inputs, group
        )
        one_row_int4.linear(x, weight, norm=norm, gated=gated, out=out, at_once=at_once)
    elif form == "fp8":
        narrow = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
        one_row_float8.linear(
            x, narrow, norm=norm, gated=gated, out=out, scales=torch.empty(outputs), at_once=at_once
        )
    elif form == "fp8 one_row":
        with patch.object(one_row, "OUTPUTS_OF_FLOAT8", at_once or one_row.OUTPUTS_OF_FLOAT8):
            narrow = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
            one_row.linear(x, narrow, norm=norm, gated=gated, out=out, scales=torch.empty(outputs))
    else:
        one_row.linear(
            x, torch.empty(outputs, inputs, dtype=DTYPE), norm=norm, gated=gated, out=out
        )


def products(name: str) -> Iterator[tuple[str, int, int, dict[str, bool]]]:
    """Yield (name, stored outputs, inputs, what is around it) for the products of a layer."""
    shape = SHAPES[name]
    heads = shape.heads * shape.head_size
    yield (
        "qkv",
        heads + 2 * shape.kv_heads * shape.head_size,
        shape.hidden,
        {"normed": True, "gated": False, "adds": False},
    )
    yield "o", shape.hidden, heads, {"normed": False, "gated": False, "adds": True}
    yield (
        "gate_up",
        2 * shape.intermediate,
        shape.hidden,
        {"normed": True, "gated": True, "adds": False},
    )
    yield "down", shape.hidden, shape.intermediate, {"normed": False, "gated": False, "adds": True}


def compiled(
    arch: int, form: str, outputs: int, inputs: int, around: dict[str, bool], at_once: int | None
) -> tuple[Compiled, int]:
    """Return the kernel of a product, and its number of programs."""
    grids = []

    def noting(kernel: Any, grid: tuple[int, ...]) -> Any:
        grids.append(grid)
        return launch(kernel, grid)

    with ExitStack() as patches:
        for module in (one_row, one_row_float8, one_row_int4):
            patches.enter_context(patch.object(module, "launch", noting))
        kernels = patches.enter_context(compiling_for(arch))
        launch_product(form, outputs, inputs, at_once=at_once, **around)
    return kernels[0], grids[0][0]


def told(kernel: Compiled, programs: int, weights: int) -> tuple[str, float]:
    """A product's cells, and the instructions of warps that all of its programs issue."""
    kinds = instructions(kernel.cubin)
    issued = kinds.total() * kernel.warps * programs
    of_processor = (
        min(65_536 // (-(-kernel.registers // 8) * 8 * 32), 64) // kernel.warps * kernel.warps
    )
    some = "".join(
        f" {kinds[kind] * kernel.warps * programs * 32 / weights:5.2f}" for kind in KINDS
    )
    return (
        f"{issued * 32 / weights:12.2f}{some} {kernel.registers:5} {kernel.spilled_bytes:7} "
        f"{of_processor:8}",
        issued,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["qwen3-8b"], choices=SHAPES)
    parser.add_argument("--arch", type=int, default=90, choices=sorted(GPUS))
    parser.add_argument("--format", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument(
        "--outputs",
        nargs="+",
        type=int,
        default=[None],
        help="of a program, instead of the kernel's choice",
    )
    args = parser.parse_args()
    kinds = "".join(f" {kind:>5}" for kind in KINDS)
    print(
        f"{'shape':12} {'format':12} {'product':8} {'instr/weight':>12}{kinds} {'regs':>5} "
        f"{'spilled':>7} {'warps/SM':>8}"
    )
    for name in args.shape:
        for form in args.format:
            for at_once in args.outputs:
                issued = 0.0
                weight_bytes = 0.0
                for product, outputs, inputs, around in products(name):
                    cells, own = told(
                        *compiled(args.arch, form, outputs, inputs, around, at_once),
                        outputs * inputs,
                    )
                    issued += own
                    weight_bytes += outputs * inputs * {"b": 2, "f": 1, "i": 0.5}[form[0]]
                    print(f"{name:12} {form:12} {product:8} {cells}", flush=True)
                issue_us = issued / (PROCESSORS * SCHEDULERS * CYCLES_PER_S) * 1e6
                memory_us = weight_bytes / BYTES_PER_S * 1e6
                print(
                    f"{name:12} {form:12} a layer: {issue_us:.1f} us to issue, {memory_us:.1f} us "
                    f"to read weights\n",
                    flush=True,
                )


if __name__ == "__main__":
    main()
