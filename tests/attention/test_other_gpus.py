"""Every kernel compiles for every supported GPU and fits its shared memory. Like `bench.compiles`,
this needs no GPU.

The quick tests compile a variant for the oldest architecture and one for a small GPU, the slow ones
all: each head size in each dtype.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton")

from bench.compiles import FORMATS_FROM, FP8_FROM, HEAD_SIZES, Case, cases, compiled, entry_points
from bench.compiling import GPUS, Compiled

from tests.attention.hopper import compile_nothing

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="a GPU compiles what it runs, and the interpreter nothing",
)

MOST_SPILLED = 512  # bytes of a thread
# for decode of 8 and more query heads a KV head: products without matrix units keep it all in
# registers
MOST_SPILLED_ON_TURING = 4096
FOR_HOPPER_ALONE = {
    "kernels.many_rows._linear",
    "kernels.one_row_float8._linear",
    "kernels.few_experts_float8._multiply",
    "kernels.few_experts_fp4._multiply",
    "kernels.experts_float8._sorted_float8",
    "kernels.experts_float8._sorted_split",
    "kernels.float8_products._split",
    "kernels.fp4_as_float8._convert",
    "dovetail_attention.triton_prefill_hopper.prefill_hopper",
}
ON_MATRIX_UNITS = {
    "kernels.few_rows._linear",
    "kernels.delta_rule._prepare",
    "kernels.delta_rule._carry",
    "kernels.mamba2._carry",
}
OF_4_BITS = {
    "kernels.streamed._linear",
    "kernels.one_row_int4._linear_int4",
    "kernels.widened._widen",
}
OF_FLOAT8 = {"kernels.float8_products._narrow", "kernels.float8_products._norm_and_narrow"}
FOR_ALL = entry_points() - FOR_HOPPER_ALONE - ON_MATRIX_UNITS - OF_4_BITS - OF_FLOAT8


def expected_on(arch: int) -> set[str]:
    gpu = GPUS[arch]
    of_formats = (OF_4_BITS if arch >= FORMATS_FROM else set()) | (
        OF_FLOAT8 if arch >= FP8_FROM else set()
    )
    return (
        FOR_ALL
        | of_formats
        | (ON_MATRIX_UNITS if gpu.has_matrix_units else set())
        | (FOR_HOPPER_ALONE if gpu.is_hopper else set())
    )


def assert_fit(case: Case, kernels: Iterable[Compiled]) -> None:
    gpu = GPUS[case.arch]
    most_spilled = (
        MOST_SPILLED if gpu.has_matrix_units or case.group < 8 else MOST_SPILLED_ON_TURING
    )
    for kernel in kernels:
        assert kernel.shared_bytes <= gpu.shared_bytes, f"{kernel.full_name} ({case})"
        assert kernel.spilled_bytes <= most_spilled, f"{kernel.full_name} ({case})"
        assert ("griddepcontrol" in kernel.ptx) <= gpu.has_pdl, f"{kernel.full_name} ({case})"
        assert kernel.registers * kernel.warps * 32 <= 65_536, f"{kernel.full_name} ({case})"


@pytest.mark.parametrize(
    "case",
    [
        Case(75, "float16", 16, brief=True),
        pytest.param(
            Case(86, "bfloat16", 128, brief=True), marks=pytest.mark.slow("compiles kernels")
        ),
        pytest.param(Case(80, "bfloat16", 32, brief=True), marks=pytest.mark.full),
        pytest.param(Case(89, "bfloat16", 256, brief=True), marks=pytest.mark.full),
        pytest.param(Case(100, "bfloat16", 16, brief=True), marks=pytest.mark.full),
        pytest.param(Case(120, "float32", 64, brief=True), marks=pytest.mark.full),
        pytest.param(Case(89, "bfloat16", 128, brief=True, fp8=True), marks=pytest.mark.full),
        pytest.param(Case(100, "float32", 8, brief=True, fp8=True), marks=pytest.mark.full),
        pytest.param(Case(120, "float16", 256, brief=True, fp8=True), marks=pytest.mark.full),
    ],
    ids=lambda case: f"sm_{case.arch}, {case}",
)
def test_attention_has_room_on_other_architectures(case: Case) -> None:
    kernels = compiled(case)
    assert {"decode_shares", "attend_prefix", "prefill_tiles", "scatter"} <= {
        kernel.name for kernel in kernels
    }
    assert_fit(case, kernels)


@pytest.mark.full
@pytest.mark.parametrize("arch", sorted(GPUS))
def test_every_kernel_has_room_on_every_architecture(arch: int) -> None:
    """For every dtype and head size that is served there."""
    found: set[str] = set()
    for case in cases(arch):
        kernels = compiled(case)
        found |= {kernel.full_name for kernel in kernels}
        assert_fit(case, kernels)
    assert found == expected_on(arch)


@pytest.mark.parametrize("arch", [75, 86, 90])  # without matrix units, with them, and a Hopper
def test_every_kernel_is_launched_for_every_sort_of_architecture(
    arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches are those that the slow tests compile; nothing is compiled here."""
    compile_nothing(monkeypatch)
    launched = [
        kernel
        for case in (Case(arch, "float16"), Case(arch, "float16", 64), Case(arch, "float32", 64))
        for kernel in compiled(case)
    ]
    assert {kernel.full_name for kernel in launched} == expected_on(arch)


def test_every_head_size_that_is_declared_is_compiled_for() -> None:
    for arch, gpu in GPUS.items():
        dtypes = {"float32", "float16", *(["bfloat16"] if gpu.has_bfloat16 else [])}
        assert {(case.dtype, case.head_size) for case in cases(arch) if case.head_size} == {
            (d, size) for d in dtypes for size in HEAD_SIZES
        }


def test_every_kernel_that_is_launched_is_known() -> None:
    """`entry_points` reads the sources: it would miss a launch that is written in another way."""
    assert entry_points() >= FOR_HOPPER_ALONE | ON_MATRIX_UNITS
    assert {
        "dovetail_samplers.fused._choose",
        "runtime.decode_rows_kernels._append",
        "kernels.qkv._norm_turn_write",
    } <= FOR_ALL
