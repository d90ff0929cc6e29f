"""Compiled instructions of the kernels for one row, counted by `bench.instructions` without a
GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from bench.instructions import compiled, instructions, told

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="a GPU compiles what it runs, and the interpreter nothing",
)
AROUND = {"normed": False, "gated": False, "adds": True}


@pytest.mark.slow("compiles kernels")
def test_one_row_of_float8_is_multiplied_by_matrix_units_as_it_lies_in_registers() -> None:
    kernel, programs = compiled(90, "fp8", 4096, 4096, AROUND, None)
    cells, issued = told(kernel, programs, 4096 * 4096)
    kinds, threads = instructions(kernel.cubin), kernel.warps * 32 * programs
    assert kinds["HMMA"] * threads // 32 * 256 == 4096 * 4096, (
        cells
    )  # 16 x 16 weights each: no product is computed twice
    assert issued * 32 < 2 * 4096 * 4096, cells  # `one_row` issues more than four for each weight
    assert kernel.shared_bytes <= 8 << 10  # for sums: weights and inputs have no room there
    assert kernel.spilled_bytes == 0


@pytest.mark.parametrize("form", ["int4 g128", "int4 g128 z"])
@pytest.mark.slow("compiles kernels")
def test_one_row_of_4_bits_issues_less_than_three_instructions_a_weight(form: str) -> None:
    kernel, programs = compiled(90, form, 4096, 4096, AROUND, None)
    cells, issued = told(kernel, programs, 4096 * 4096)
    assert (
        instructions(kernel.cubin)["IDP"] * kernel.warps * 32 * programs == 4096 * 4096 * 3 // 4
    ), cells  # three bytes, four weights at once
    assert issued * 32 < 3 * 4096 * 4096, cells
    assert kernel.spilled_bytes == 0
