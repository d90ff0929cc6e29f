# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803 (constants are upper case)
"""Shared parts of the kernels for experts' sorted pairs (see the top of `experts`): tilings,
activations, launching.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import pdl_options
from dovetail.nn.kernels.launch import launch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Share of one program: places, outputs (pairs if gated), inputs per chunk, chunks in flight,
    warps."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the activation of `gate`, times `up` if it is gated; all float32."""
    if ACTIVATION == 4:
        gate = tl.maximum(gate, 0.0)
        up = gate
    elif ACTIVATION == 3:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == 1:
        gate = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up


def launch_sorted(
    kernel,
    inputs,
    constants,
    bias,
    weights,
    places,
    blocks,
    out,
    tiling: Tiling,
    around: dict[str, int | float],
    *more: int,
) -> None:
    """Launch a kernel for sorted pairs, which writes `out`. `around`: constants of the gating, if
    it is gated; `more`: further arguments of the kernel."""
    outputs, (tokens, per_token) = out.shape[-1], weights.shape
    parts = places.shape[1] // tiling.rows  # of a block
    launch(kernel, (triton.cdiv(outputs, tiling.outputs), len(blocks) * parts))(
        *inputs,
        weights if bias is None else bias,
        weights,
        places,
        blocks,
        out,
        tokens * per_token,
        tokens,
        *more,
        OUTPUTS=outputs,
        TOP=per_token,
        M=tiling.rows,
        N=tiling.outputs,
        GATED=bool(around),
        BIASED=bias is not None,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **constants,
        **(around or {"ACTIVATION": 0, "ALPHA": 1.0, "LIMIT": 0.0}),
        **pdl_options(out.device),
    )
