"""The kernels of layers with states compile for a Hopper, on a machine without any GPU: bfloat16,
which the interpreter can't check."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from bench.compiles import launch_states

from dovetail.nn.state import DeltaShape, Mamba2Shape

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="a GPU compiles what it runs, and the interpreter nothing",
)


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        (DeltaShape(2, 4, 128, 128, 4), {"_prepare", "_carry"}),
        (Mamba2Shape(4, 64, 128, 1, 4), {"_carry"}),
    ],
    ids=["delta", "mamba2"],
)
@pytest.mark.slow("compiles kernels")
def test_a_layer_compiles_for_matrix_units(
    shape: DeltaShape | Mamba2Shape, chunks: set[str]
) -> None:
    from tests.attention.hopper import compiling_for_hopper

    with compiling_for_hopper() as kernels:
        launch_states(torch.bfloat16, shape)
    after_steps = {"_accept_changes", "_accept_inputs"}
    of_steps = {
        "_conv_step",
        "_conv_lines",
        "_conv_chunk",
        "_keep_inputs",
        "_recur",
        "_gated_norm",
    } | chunks
    assert {kernel.name for kernel in kernels} == of_steps | after_steps
    for kernel in kernels:
        assert ("wgmma.mma_async" in kernel.ptx) == (kernel.name in chunks), kernel.name
        assert ("griddepcontrol.wait" in kernel.ptx) == (kernel.name in of_steps), kernel.name
        assert kernel.spilled_bytes <= 512, kernel.name
        # with few states, a processor has one, which fetches more chunks ahead
        programs = 1 if kernel.name == "_carry" else 2
        assert programs * (kernel.shared_bytes + 1024) <= 228 << 10, (
            f"{programs} programs of {kernel.name} fit a processor"
        )
